"""Broken reward and agent files: `openrlhf check` and a training run say the same in one line of error, within seconds.

Each row: what is wrong → (file, line that is named or None, text that is in the error).
"""

import os
import time

import pytest
from agent_files import HEAD, MULTI_TURN, answer, env, execute
from patience import patience
from processes import living_children, wait_until

from openrlhf.cli.main import main


def function(body: str) -> str:
    return (
        f"import os, signal, sys, time\ndef reward_func(queries, prompts, labels):\n    n = len(queries)\n    {body}\n"
    )


REWARDS = {
    "a syntax error": ("def reward_func(queries:\n    pass\n", 1, "SyntaxError: "),
    "an import that fails": ("import no_such_module\n" + function("return [0.0] * n"), 1, "ModuleNotFoundError: No module named 'no_such_module'"),
    "a module that exits": (function("return [0.0] * n") + "sys.exit(3)\n", 5, "SystemExit: 3 (while the file was loaded)"),
    "a name that is no function": ("reward_func = 1.0\n", None, "defines no function reward_func(queries, prompts, labels)"),
    "no arguments": ("def reward_func():\n    return 1.0\n", 1, "reward_func takes (), but is called with (queries, prompts, labels)"),
    "other arguments": ("\ndef reward_func(completions, answer):\n    return 1.0\n", 2, "reward_func takes (completions, answer), but is called with (queries, prompts, labels)"),
    "raises": (function("return [len(label['answer']) for label in labels]"), 4, "(in reward_func): TypeError: string indices must be integers"),
    "raises further down": ("def grade(q):\n    return 1 / 0\ndef reward_func(queries):\n    return [grade(q) for q in queries]\n", 2, "(in grade): ZeroDivisionError: division by zero"),
    "never ends its recursion": ("def reward_func(queries):\n    return reward_func(queries)\n", 2, "RecursionError: maximum recursion depth exceeded"),
    "exits": (function("sys.exit('no key')"), 4, "(in reward_func): SystemExit: no key"),
    "returns nothing": (function("[0.0] * n"), 2, "it returned None: is a `return` missing? Expected"),
    "too few values": (function("return [1.0]"), 2, "its rewards has 1 values for"),
    "too many values": (function("return [0.0] * 99"), 2, "its rewards has 99 values for"),
    "two values per sample": (function("return [[0.0, 1.0]] * n"), 2, ", one per sample}"),
    "an array of no values": (function("import numpy; return {'rewards': numpy.zeros((0, 1))}"), 2, "its rewards has 0 values for"),
    "not a number": (function("return [float('nan')] * n"), 2, "its rewards[0] must be finite, got nan"),
    "infinite": (function("return {'rewards': [0.0] * (n - 1) + [float('-inf')]}"), 2, "must be finite, got -inf"),
    "too large": (function("return [1e40] * n"), 2, "its rewards[0] is too large for a float32: 1e+40 (float)"),
    "numbers as text": (function("return ['1.0'] * n"), 2, "its rewards[0] must be one number, got '1.0' (str)"),
    "a value missing": (function("return [None] * n"), 2, "its rewards[0] must be one number, got None"),
    "no rewards key": (function("return {'reward': [0.0] * n, 'scores': [0.0] * n}"), 2, "it returned a dict without 'rewards' (with 'reward', 'scores')"),
    "a dict in the dict's dict": (function("return {'rewards': {'format': {'a': [0.0] * n}}}"), 2, "its rewards['format'] must be one number, got {'a': "),
    "a set": (function("return {0.0, 1.0}"), 2, "its rewards must be one number, got {0.0, 1.0} (set)"),
    "too few scores": (function("return {'rewards': [0.0] * n, 'scores': [1.0]}"), 2, "its scores has 1 values for"),
    "logs that are no dict": (function("return {'rewards': [0.0] * n, 'extra_logs': [1.0]}"), 2, "its 'extra_logs' must be a dict of numbers, got [1.0] (list of 1)"),
    "a log in words": (function("return {'rewards': [0.0] * n, 'extra_logs': {'why': ['bad'] * n}}"), 2, "its extra_logs['why'][0] must be one number, got 'bad' (str)"),
    "prints garbage": (function("print('\\x00\\x1b[2J' * 2000, flush=True); os.write(1, bytes(range(256)) + b'\\n'); return 'bad'"), 2, "its rewards must be one number, got 'bad' (str)"),
    "hangs": (function("time.sleep(600)"), None, "did not answer in 1 s (--reward.timeout)"),
    "is killed": (function("os.kill(os.getpid(), signal.SIGSEGV)"), None, "the process was killed by SIGSEGV while reward_func of "),
}  # fmt: skip

AGENTS = {
    "a syntax error": ("class AgentExecutor(\n", 3, "SyntaxError: "),
    "an import that fails": ("import no_such_module\n" + env(), 3, "ModuleNotFoundError: No module named 'no_such_module' (while the file was loaded)"),
    "an object for a class": (env() + "AgentExecutor = AgentExecutor()\n", None, "AgentExecutor must be a class, got AgentExecutor"),
    "no execute": ("class AgentExecutor(AgentExecutorBase):\n    pass\n", 3, "AgentExecutor does not define execute(self, prompt, label, sampling_params, "),
    "another base": ("class AgentExecutor(AgentInstanceBase):\n    def __init__(self):\n        pass\n    async def step(self, states):\n        return {}\n", 3, "AgentExecutor does not define execute(self, prompt, label, "),
    "an executor that wants arguments": (env().replace("def __init__(self):\n        super", "def __init__(self, model):\n        super"), 10, "AgentExecutor is made without arguments, or with (max_steps, "),
    "an executor that raises": (env().replace("super().__init__(AgentInstance)", "open('no such file')"), 12, "FileNotFoundError: [Errno 2] No such file or directory: 'no such file' (while AgentExecutor was made)"),
    "no super().__init__": (env().replace("super().__init__(AgentInstance)", "pass"), 10, "AgentExecutor.__init__ does not call super().__init__(AgentInstance)"),
    "no step": (f"class AgentInstance:\n    pass\n{MULTI_TURN}", 3, "AgentInstance does not define step(self, states, **kwargs)"),
    "a step without states": (env().replace("def step(self, states)", "def step(self)"), 8, "step is called with one argument, states, but takes (self)"),
    "an instance that raises": (env(init="self.key = {}['KEY']"), 5, "(in __init__): KeyError: 'KEY'"),
    "reset raises": (env(reset="return {'observation': states['prompt']}"), 7, "(in reset): KeyError: 'prompt'"),
    "reset returns nothing": (env(reset="self.n = 1"), 6, "reset returned None: is a `return` missing?"),
    "reset returns no text": (env(reset="return {'observation': [{'role': 'user'}]}"), 6, "reset's 'observation' must be text, got [{'role': 'user'}] (list of 1)"),
    "step raises": (env("return self.answer"), 9, "(in step): AttributeError: 'AgentInstance' object has no attribute 'answer'"),
    "step exits": (env("exit(3)"), 9, "(in step): SystemExit: 3"),
    "step returns a tuple": (env("return 'hm', 1.0, True, {}"), 8, "step must return a dict, got ('hm', 1.0, True, {}) (tuple of 4)"),
    "no rewards": (env("return {'reward': 1, 'done': True}"), 8, "step returned a dict without 'rewards', with 'reward', 'done'"),
    "no done": (env("return {'rewards': 1}"), 8, "step returned a dict without 'done', with 'rewards'"),
    "a reward that is no number": (env("return {'rewards': torch.tensor(float('nan')), 'done': True}"), 8, "step's 'rewards' must be finite, got tensor(nan)"),
    "two rewards": (env("return {'rewards': torch.ones(2), 'done': True}"), 8, "step's 'rewards' must be one number, got tensor([1., 1.]) (Tensor of shape (2,))"),
    "done in words": (env("return {'rewards': 1, 'done': 'no'}"), 8, "step's 'done' must be True or False, got 'no' (str)"),
    "feedback that is no text": (env("return {'rewards': 0, 'done': False, 'environment_feedback': ['try again']}"), 8, "step's 'environment_feedback' must be text, got ['try again'] (list of 1)"),
    "a log in words": (env("return {'rewards': 0, 'done': True, 'extra_logs': {'tool': 'search'}}"), 8, "step's 'extra_logs'['tool'] must be one number, got 'search' (str)"),
    "parameters that cannot be": (env("states['sampling_params'].top_p = 2; return {'rewards': 1, 'done': False, 'sampling_params': states['sampling_params']}"), 8, "step's 'sampling_params' cannot be used: top_p must be in (0, 1], got 2.0"),
    "execute raises": (execute("return await llm_engine.complete(prompt)"), 8, "(in execute): AttributeError: 'RecordingEngine' object has no attribute 'complete'"),
    "execute asks with text": (execute("await llm_engine.generate(prompt, sampling_params)"), 8, "(in execute): BadValueError: prompt_token_ids must be token ids, got text: "),
    "execute asks with unknown tokens": (execute("await llm_engine.generate([10 ** 6], sampling_params)"), 8, "(in execute): ValueError: prompt ids must be in 0 … "),
    "execute asks with other parameters": (execute("await llm_engine.generate(ids, {'max_tokens': 4})"), 8, "(in execute): BadValueError: sampling_params must be sampling parameters"),
    "execute returns text": (execute("return hf_tokenizer.decode(tokens)"), 4, "execute must return a dict, got "),
    "no reward": (execute("return {'observation_tokens': tokens, 'action_ranges': ranges}"), 4, "execute returned a dict without 'reward', with 'observation_tokens', 'action_ranges'"),
    "tokens as text": (answer(observation_tokens="hf_tokenizer.decode(tokens)"), 4, "execute's 'observation_tokens' must be token ids, got text: "),
    "tokens that do not exist": (answer(observation_tokens="[10 ** 6] + tokens[1:]"), 4, "execute's 'observation_tokens'[0] is 1000000, but the tokenizer has "),
    "ranges beyond the tokens": (answer(action_ranges="[(2, 999)]"), 4, "execute's 'action_ranges'[0] = (2, 999) goes beyond the "),
    "ranges that overlap": (answer(action_ranges="[(1, 4), (3, 5)]"), 4, "execute's 'action_ranges'[1] = (3, 5) overlaps execute's 'action_ranges'[0] = (1, 4)"),
    "too few log-probs": (answer(rollout_log_probs="[]"), 4, "execute's 'rollout_log_probs' has 0 values for "),
}  # fmt: skip

DEADLY_AGENTS = {
    "hangs": (env("import time; time.sleep(600)"), None, "agent.py: step() took longer than 1 s (--rollout.step_timeout 1)"),
    "dies": (env("import os; os._exit(3)"), None, "agent.py: the process ended with exit code 3 while it played this episode"),
}  # fmt: skip
"""They need a process of their own, which takes seconds to start."""


@pytest.fixture
def check(capfd):
    """Runs `openrlhf check` in this process; the one line of error. Nothing else may be on stdout, or left behind."""

    def run(*words: object) -> str:
        others = set(living_children(os.getpid()))
        rc = main(["check", *map(str, words)])
        said = capfd.readouterr()
        assert rc == 1, said.out
        assert said.out == ""
        assert wait_until(lambda: set(living_children(os.getpid())) <= others)
        return one_error(said.err)

    return run


def one_error(err: str) -> str:
    assert "Traceback" not in err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    return line


def says(line: str, file, number: int | None, text: str) -> None:
    assert text in line
    assert str(file) in line
    if number is not None:
        assert f"{file}:{number}" in line, line


def rows(table):
    return pytest.mark.parametrize(("source", "number", "text"), table.values(), ids=table.keys())


@rows(REWARDS)
def test_broken_rewards(check, cli, tmp_path, source, number, text):
    file = tmp_path / "reward.py"
    file.write_text(source)
    timeout = 1 if "--reward.timeout" in text else 30
    began = time.monotonic()
    says(check(file, "--timeout", timeout, "--n", 2), file, number, text)
    assert time.monotonic() - began < patience(10)
    ran = cli(reward__remote_url=file, reward__timeout=timeout)
    assert ran.rc == 1
    says(one_error(ran.err), file, number, text)
    assert ran.seconds < patience(10)


@rows(AGENTS)
def test_broken_agents(check, cli, tmp_path, source, number, text):
    """In this process, where an agent's file is loaded at once."""
    file = tmp_path / "agent.py"
    file.write_text(HEAD + source)
    began = time.monotonic()
    says(check(file, "--agent_hosts", 0, "--n", 2), file, number, text)
    assert time.monotonic() - began < patience(10)
    ran = train(cli, file, rollout__agent_hosts=0)
    assert ran.rc == 1
    says(one_error(ran.err), file, number, text)
    assert ran.seconds < patience(10)


@pytest.mark.slow
@rows(DEADLY_AGENTS)
def test_deadly_agents(check, cli, tmp_path, source, number, text):
    file = tmp_path / "agent.py"
    file.write_text(HEAD + source)
    says(check(file, "--timeout", 1, "--n", 2), file, number, text)
    one = {"rollout__batch_size": 1, "rollout__n_samples_per_prompt": 1, "train__batch_size": 1}
    ran = train(cli, file, rollout__step_timeout=1, algo__advantage__estimator="reinforce", **one)
    assert ran.rc == 1
    says(one_error(ran.err), file, number, text)


def train(cli, file, **overrides):
    """Agents have 24 tokens, 3 a turn."""
    flags = {"reward__remote_url": "none", "data__max_len": 24, "rollout__max_new_tokens": 3}
    return cli("--train.agent_func_path", str(file), **flags, **overrides)
