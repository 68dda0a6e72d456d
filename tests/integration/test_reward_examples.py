"""The reward files in examples/, as a run calls them: through the host process."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from patience import patience

from openrlhf.rewards.base import RewardError, RewardRequest
from openrlhf.rewards.function_file import FunctionFileReward
from openrlhf.utils import sandbox

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"


def judge(name, responses, labels, *, prompt="Question: "):
    """The rewards of one prompt's samples."""

    async def main():
        reward = FunctionFileReward(EXAMPLES / name, timeout=60)
        try:
            await reward.start()
            return await reward.score(
                RewardRequest(
                    queries=tuple(prompt + response for response in responses),
                    prompts=(prompt,) * len(responses),
                    labels=tuple(labels),
                    name="record 1",
                )
            )
        finally:
            await reward.close()

    return asyncio.run(main())


class TestMath:
    def test_boxed_answers(self):
        judged = judge(
            "math_reward_func.py",
            [
                r"It is \boxed{\frac{1}{2}}.",
                r"\boxed{2}, no, \boxed{0.5}",
                r"It is \boxed{0.25}",
                "It is 0.5",
                r"\boxed{9^{9^{9^{9}}}}",
            ],
            ["1/2"] * 4 + [r"so it is \boxed{x}"],
            prompt=r"Put it in \boxed{0.5}: ",
        )
        assert [r.reward for r in judged] == [1.0, 1.0, 0.0, 0.0, 0.0]
        assert [r.score for r in judged] == [1.0, 1.0, 0.0, 0.0, 0.0]
        assert [r.extra_logs for r in judged] == [{"boxed": float(b)} for b in (1, 1, 1, 0, 1)]


class TestFormatAndLength:
    def test_each_part_counts(self):
        """1 + 0.2 for right in form; 0.2 for form alone; 1 + 0.2 − 0.5·½ half way through the buffer; and nothing."""
        good = "<think>2+2</think>\n<answer>4</answer>"
        long = "<think>" + "x" * (3000 - 7 - 8 - 18) + "</think><answer>4</answer>"
        assert len(long) == 3000
        judged = judge(
            "format_length_reward_func.py",
            [good + "<|im_end|>", good.replace("4", "5"), long, "4", "x" * 9000],
            ["4"] * 5,
        )
        assert [r.reward for r in judged] == pytest.approx([1.2, 0.2, 0.95, 0.0, -0.5])
        assert [r.score for r in judged] == [1.0, 0.0, 1.0, 0.0, 0.0]
        assert judged[2].extra_logs == {"correct": 1.0, "format": 1.0, "overlong": 0.5}


def code(*lines):
    return "Here it is:\n```python\n" + "\n".join(lines) + "\n```\nDone."


class TestCode:
    TESTS = ("assert add(1, 2) == 3", "assert add(-1, 1) == 0")

    def judge(self, *responses, tests=TESTS):
        return [(r.reward, r.score) for r in judge("code_reward_func.py", responses, [list(tests)] * len(responses))]

    def test_tests_that_pass(self):
        right = code("def add(a, b):", "    return a + b")
        half = code("def add(a, b):", "    return abs(a) + b")
        assert self.judge(
            right,
            half,
            code("def add(a, b):", "    return a - b"),
            code("def add(a, b:"),
            code("def sub(a, b): ..."),
            "def add(a, b): return a + b",
            code("def add(a, b):", "    return 0") + right,
        ) == [(1.0, 1.0), (0.5, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (1.0, 1.0)]

    def test_tests_as_text(self):
        (judged,) = judge("code_reward_func.py", [code("x = 1")], ["assert x == 1\n\nassert x != 1\n"])
        assert judged.reward == 0.5
        assert judged.extra_logs == {"has_code": 1.0, "tests_passed": 0.5}

    def test_a_label_without_tests_is_an_error_not_a_zero(self):
        with pytest.raises(
            RewardError, match=r"code_reward_func\.py:\d+ \(in tests_of\): ValueError: the label has no tests"
        ):
            judge("code_reward_func.py", [code("x = 1")], [""])

    def test_unruly_code_is_ended_and_others_are_judged(self, tmp_path):
        """Endless loops, memory, huge files, early exits, noise and processes that stay: none lasts, none passes."""
        marker = f"answer-test-{os.getpid()}"
        before = time.monotonic()
        outcomes = self.judge(
            code("while True: pass"),
            code("def add(a, b):", "    while a < 0: pass", "    return a + b"),
            code("x = [0] * (1 << 31)", "def add(a, b):", "    return a + b"),
            code("open('big', 'wb').write(bytes(1 << 24))", "def add(a, b):", "    return a + b"),
            code("import os", "os._exit(0)"),
            code("print('1' * 100000)", "raise SystemExit"),
            code(
                "import subprocess, sys",
                f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)', '{marker}'])",
            ),
            code("def add(a, b):", "    return a + b"),
        )
        assert [reward for reward, _ in outcomes] == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        assert time.monotonic() - before < patience(40)
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with_arguments = command.read_bytes() if command.exists() else b""
            assert marker.encode() not in with_arguments

    def test_it_sees_neither_our_environment_nor_our_files(self, monkeypatch):
        monkeypatch.setenv("MY_TOKEN", "SECRET")
        tests = ["assert 'MY_TOKEN' not in os.environ", "assert os.listdir() == []", "assert 'tests' not in globals()"]
        assert self.judge(code("import os"), tests=tests) == [(1.0, 1.0)]

    def test_it_has_no_network(self):
        if sandbox.level() < sandbox.Level.FILTERS:
            pytest.skip(sandbox.describe())
        answer = code(
            "import socket",
            "def reach():",
            "    server = socket.create_server(('127.0.0.1', 0))",
            "    socket.create_connection(server.getsockname(), timeout=2)",
        )
        assert self.judge(answer, tests=["reach()"]) == [(0.0, 0.0)]

    def test_inputs_and_outputs(self):
        """Two of three outputs are right; a program that fails after the right output has not passed."""
        program = code("a, b = map(int, input().split())", "print(a + b)", "assert a > 0")
        (judged,) = judge("code_reward_func.py", [program], [[["1 2\n", "3\n"], ["2 2", "4"], ["-1 1", "0"]]])
        assert judged.reward == pytest.approx(2 / 3)
        assert judged.score == 0.0
