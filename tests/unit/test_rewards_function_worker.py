"""Users' reward files: how they are loaded and called, without the host process."""

import asyncio
import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from openrlhf.agents.user_calls import UserFileError
from openrlhf.rewards.function_worker import RewardFunction, RewardFunctionError, adapt

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "reward_func.py"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A reward function from source text, in the file `reward.py`."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source, name="reward.py"):
        path = tmp_path / name
        path.write_text(source)
        return RewardFunction(str(path))

    yield write
    for name in [name for name in sys.modules if name.startswith("user_file_")]:
        del sys.modules[name]


def called(function):
    """Which of the three lists reach which parameter."""
    return adapt(function, place="reward.py:1")(["q"], ["p"], ["l"])


class TestSignatures:
    @pytest.mark.parametrize(
        "source",
        [
            "lambda queries, prompts, labels: (queries, prompts, labels)",
            "lambda queries, prompts, labels, **kwargs: (queries, prompts, labels)",
            "lambda labels, queries, prompts: (queries, prompts, labels)",
            "lambda q, p, l: (q, p, l)",
            "lambda q, p, l, extra=None: (q, p, l)",
            "lambda *lists: lists",
            "lambda *, labels, prompts, queries: (queries, prompts, labels)",
            "lambda **lists: (lists['queries'], lists['prompts'], lists['labels'])",
            "lambda queries, p, l, /: (queries, p, l)",
        ],
    )
    def test_all_three(self, source):
        assert called(eval(source)) == (["q"], ["p"], ["l"])

    def test_some_by_name(self):
        assert called(lambda queries, labels: (queries, labels)) == (["q"], ["l"])
        assert called(lambda queries, temperature=1.0: (queries, temperature)) == (["q"], 1.0)

    @pytest.mark.parametrize("source", ["lambda: 0", "lambda x, y: 0", "lambda a, b, c, d: 0"])
    def test_others_are_refused_at_once(self, source):
        function = eval(source)
        with pytest.raises(UserFileError) as caught:
            called(function)
        assert str(caught.value) == (
            f"reward.py:1: reward_func takes {inspect.signature(function)}, "
            f"but is called with (queries, prompts, labels)"
        )


class TestLoading:
    def test_neighbours_can_be_imported(self, load, tmp_path):
        (tmp_path / "grading_helper.py").write_text("def grade(text): return len(text)")
        reward = load("from grading_helper import grade\ndef reward_func(queries): return [grade(q) for q in queries]")
        assert asyncio.run(reward.score(["ab", "abc"], ["", ""], ["", ""])).rewards == [2.0, 3.0]

    def test_name_of_a_standard_module(self, load):
        load("import json\ndef reward_func(queries): return json.dumps(1)", name="json.py")
        assert "json.py" not in str(sys.modules["json"].__file__).replace("json/__init__.py", "")

    def test_syntax_error(self, load, tmp_path):
        with pytest.raises(UserFileError, match=r"reward\.py:2: SyntaxError: "):
            load("x = 1\ndef reward_func(:\n")

    def test_import_error(self, load):
        with pytest.raises(UserFileError) as caught:
            load("\nimport no_such_module_here\n")
        assert "reward.py:2: ModuleNotFoundError: No module named 'no_such_module_here'" in str(caught.value)

    def test_script_that_exits(self, load):
        with pytest.raises(UserFileError, match=r"reward\.py:1: SystemExit: 3 \(while the file was loaded\)"):
            load("raise SystemExit(3)")

    @pytest.mark.parametrize("source", ["{}", "reward_func = 3\n{}"])
    def test_no_reward_func(self, load, source):
        with pytest.raises(UserFileError) as caught:
            load(source.format("from math import sqrt\ndef rewards(q): ...\nclass Judge: ...\ndef _hidden(): ..."))
        assert str(caught.value).endswith(
            "reward.py defines no function reward_func(queries, prompts, labels); it has rewards, Judge"
        )


class TestCalls:
    def test_exception_names_the_innermost_line_of_the_file(self, load):
        """The error arises inside json; what helps is line 3 of the user's file."""
        reward = load(
            "import json\ndef parse(text):\n    return json.loads(text)\ndef reward_func(queries): parse('{')"
        )
        with pytest.raises(RewardFunctionError) as caught:
            asyncio.run(reward.score(["q"], ["p"], [""]))
        assert "reward.py:3 (in parse): JSONDecodeError: Expecting property name" in str(caught.value)

    def test_bad_value_names_where_the_function_begins(self, load):
        reward = load("\n\ndef reward_func(queries): return [1.0]")
        with pytest.raises(UserFileError) as caught:
            asyncio.run(reward.score(["q", "q"], ["p", "p"], ["", ""]))
        assert "reward.py:3: what reward_func returned cannot be used: its rewards has 1 values for 2" in str(
            caught.value
        )
        assert not isinstance(caught.value, RewardFunctionError)

    def test_async(self, load):
        reward = load("async def reward_func(queries):\n    if queries == ['x']:\n        1 / 0\n    return [1.0]")
        assert asyncio.run(reward.score(["q"], ["p"], [""])).rewards == [1.0]
        with pytest.raises(RewardFunctionError, match=r"reward\.py:3 \(in reward_func\): ZeroDivisionError"):
            asyncio.run(reward.score(["x"], ["p"], [""]))

    def test_exception_whose_text_fails(self, load):
        reward = load("class Odd(Exception):\n    def __str__(self): 1 / 0\ndef reward_func(queries): raise Odd")
        with pytest.raises(RewardFunctionError, match="Odd: "):
            asyncio.run(reward.score(["q"], ["p"], [""]))


class TestExample:
    @pytest.fixture(scope="class")
    def example(self):
        spec = importlib.util.spec_from_file_location("example_reward_func", EXAMPLE)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    @pytest.mark.parametrize(
        ("response", "label", "reward"),
        [
            (r"so \boxed{4}, no: \boxed{5}", "5", 1.0),
            (r"7 apples, then \boxed{5}.", 5, 1.0),
            ("3 + 2\n#### 1,005", "1005", 1.0),
            ("it is 5.0", "5", 1.0),
            ("it is -5.", "5", 0.0),
            (r"\boxed{Paris}", "paris", 1.0),
            ("I do not know", "5", 0.0),
        ],
    )
    def test_answers(self, example, response, label, reward):
        prompt = "What is 9 - 4? "
        judged = example.reward_func([prompt + response], [prompt], [label])
        assert judged["rewards"] == judged["scores"] == [reward]

    def test_loads_and_returns_usable_values(self):
        values = asyncio.run(RewardFunction(str(EXAMPLE)).score(["1+1=2", "1+1=3"], ["1+1="] * 2, ["2"] * 2))
        assert values.rewards == [1.0, 0.0]
        assert values.extra_logs == {"answered": [1.0, 1.0], "response_chars": [1.0, 1.0]}
