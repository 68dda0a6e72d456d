"""An agent program that knows nothing of training, trained as it is: arithmetic with a calculator, through the `openai`
client (pip install openai).

    python -m openrlhf.cli.train_ppo_ray --train.agent_func_path examples/python/agent_func_openai_server_executor.py \
        --actor.model_name_or_path Qwen/Qwen3-0.6B --data.prompt_dataset sums.jsonl --data.label_key label …

A record is {"input": "What is 17 * 23 + 4?", "label": "395"}; leave --data.apply_chat_template out, the server applies
the template to the program's messages.

`solve` is the program, as it would run against any OpenAI-compatible server. `AgentExecutor` hands it a client whose
base URL belongs to one episode: everything asked there is recorded, token by token, and trained on.
`docs/openai_agents.md` has the rest.
"""

import ast
import json
import operator
import re

from openai import AsyncOpenAI, BadRequestError

from openrlhf.utils.agent import OpenAIServerAgentExecutor

SYSTEM = "Use the calculator for every calculation, then answer with the number alone."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluates an expression of numbers, + - * / and parentheses.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]
MOST_TURNS = 6
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


# ------------------------------------------------------------------------------------ the program


async def solve(client, question):
    """The final answer, None if there is none, and how many calculations it took."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    calculations = 0
    for _ in range(MOST_TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        reply = completion.choices[0].message
        # The reply goes back as it came: then the conversation goes on, token by token. One that is edited begins anew.
        messages.append(reply)
        if not reply.tool_calls:
            return reply.content, calculations
        for call in reply.tool_calls:
            calculations += 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)})
    return None, calculations


def calculate(arguments):
    """The tool. What the model did wrong it is told, so that it can try again."""
    try:
        value = evaluate(ast.parse(json.loads(arguments)["expression"], mode="eval").body)
    except (ArithmeticError, KeyError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"error: {type(error).__name__}"
    return f"{value:.10g}"


def evaluate(node):
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
    raise ValueError("not arithmetic")


# ------------------------------------------------------------------------------------ its training


class AgentExecutor(OpenAIServerAgentExecutor):
    def __init__(self):
        super().__init__()
        # Making a client takes a while, copying it for an episode does not.
        self.client = AsyncOpenAI(base_url=self.base_url, api_key="none", max_retries=0)

    async def run_agent(self, prompt, label, base_url):
        try:
            answer, calculations = await solve(self.client.with_options(base_url=base_url), prompt)
        except BadRequestError as error:
            if error.code not in ("context_length_exceeded", "turn_limit_exceeded"):
                raise  # an error fails the episode, which is then no part of training
            answer, calculations = None, 0  # it talked for too long: that is worth nothing, and worth learning
        numbers = NUMBER.findall(answer or "")
        right = bool(numbers) and abs(float(numbers[-1]) - float(label)) < 1e-6
        return {
            "reward": right + 0.1 * (calculations > 0),
            "scores": float(right),
            "extra_logs": {"calculations": calculations},
        }
