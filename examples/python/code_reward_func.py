"""Programming: run the answer's Python code against the tests of the label, and count those that pass.

    openrlhf rl --reward.remote_url examples/python/code_reward_func.py --data.label_key tests …

The label is a list of tests (or one string, a test per line), each a statement that raises when the code is wrong:

    {"input": "Write add(a, b).", "tests": ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]}

or a list of inputs and outputs, for a program that reads stdin and writes stdout:

    {"input": "Read two numbers and write their sum.", "tests": [["1 2\\n", "3\\n"], ["-1 1\\n", "0\\n"]]}

The code is the last ```python block of the answer. It runs in a sandbox (`openrlhf.utils.sandbox`): no network, no
files but its own, limits on time, memory, processes and output. What holds it depends on the machine; set AT_LEAST to
refuse machines that offer less (docs/rewards.md, "Programming").
"""

import asyncio
import re

from openrlhf.utils import sandbox

LIMITS = sandbox.Limits(seconds=5, memory=512 << 20, file_size=1 << 20)
"""For one answer and all its statements together, or for each of its inputs."""
TOGETHER = 10
"""Seconds for all inputs of an answer: when they are over, no further one is tried."""
AT_LEAST = None
"""Or sandbox.Level.FILTERS, or sandbox.Level.NAMESPACES."""

CODE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


def extract_code(response):
    """The last fenced block, or None."""
    blocks = CODE.findall(response)
    return blocks[-1] if blocks else None


def tests_of(label):
    """The label as a list of statements, or of (input, output)."""
    tests = label if isinstance(label, list) else [line for line in str(label).splitlines() if line.strip()]
    if not tests:
        raise ValueError("the label has no tests")  # a made-up reward would be worse than none
    return tests


async def judge(response, label):
    tests = tests_of(label)
    code = extract_code(response)
    if code is None:
        return 0.0, False
    if isinstance(tests[0], str):
        graded = await sandbox.grade_asserts_async(code, tests, limits=LIMITS, at_least=AT_LEAST)
    else:
        graded = await sandbox.grade_outputs_async(code, tests, together=TOGETHER, limits=LIMITS, at_least=AT_LEAST)
    return graded.share, True


async def reward_func(queries, prompts, labels):
    judged = await asyncio.gather(
        *(judge(query[len(prompt) :], label) for query, prompt, label in zip(queries, prompts, labels, strict=True))
    )
    shares = [share for share, _ in judged]
    return {
        "rewards": shares,
        "scores": [float(share == 1.0) for share in shares],
        "extra_logs": {"has_code": [there for _, there in judged], "tests_passed": shares},
    }
