"""The reward of an MCP world as a function: half for asking the shop without a failure, half for the right answer."""


def reward_func(label, calls, answer):
    """`calls` are all that were made: {"name", "arguments", "answer", "failed"} each."""
    asked = any(call["name"] == "price" and not call["failed"] for call in calls)
    return 0.5 * asked + 0.5 * (answer.strip() == str(label))
