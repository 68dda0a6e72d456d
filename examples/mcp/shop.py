"""An MCP server in a few lines: a shop, whose prices the policy must ask for. Needs the package mcp.

python examples/mcp/shop.py              # over stdio, as a client starts it
python examples/mcp/shop.py 8000         # over HTTP: http://127.0.0.1:8000/mcp
"""

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PRICES = {"apple": 2, "pear": 3, "plum": 4, "fig": 7}
server = MCPServer("shop")


@server.tool()
def price(item: str) -> int:
    """What an item costs."""
    if item not in PRICES:
        raise ToolError(f"there is no {item}; there are {', '.join(PRICES)}")
    return PRICES[item]


@server.tool()
def grade(label: int, answer: str) -> float:
    """1 where the answer is right. Named as reward=tool:grade: the policy does not see it."""
    return float(answer.strip() == str(label))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
