"""Broken agents: each has a message of its own, in one line, with the place in the user's file."""

import asyncio
import textwrap

import pytest
from agent_files import HEAD, MULTI_TURN, answer, env, execute
from scripted_engine import CharTokenizer, says

from openrlhf.agents.user_agent import load_agent
from openrlhf.agents.user_calls import AgentError, AgentResultError, UserFileError
from openrlhf.types import SamplingParams

LOADING = {
    "no executor": (env().replace("class AgentExecutor", "class Executor"), None, "defines no class AgentExecutor; it has AgentInstance, Executor"),
    "an empty file": ("", None, "defines no class AgentExecutor; it has no classes"),
    "an executor that is an object": (env() + "AgentExecutor = AgentExecutor()", None, "AgentExecutor must be a class, got AgentExecutor"),
    "a syntax error": ("class AgentExecutor(:\n", 3, "SyntaxError"),
    "an import that fails": ("import no_such_module_anywhere\n", 3, "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    "a constructor with other arguments": (env().replace("def __init__(self):\n        super", "def __init__(self, model):\n        super"), 10, "AgentExecutor is made without arguments, or with (max_steps, max_length, llm_engine, hf_tokenizer, result_queue), but takes (model)"),
    "a constructor that raises": (env().replace("super().__init__(AgentInstance)", "1 / 0"), 12, "ZeroDivisionError: division by zero (while AgentExecutor was made)"),
    "a constructor without super": (env().replace("super().__init__(AgentInstance)", "pass"), 10, "AgentExecutor.__init__ does not call super().__init__(AgentInstance)"),
    "an instance instead of its class": (env().replace("__init__(AgentInstance)", "__init__(AgentInstance())"), 12, "TypeError: the agent instance must be a class, got AgentInstance"),
    "no execute": ("class AgentExecutor(AgentExecutorBase):\n    pass\n", 3, "AgentExecutor does not define execute(self, prompt, label, "),
    "an unrelated class": ("class AgentExecutor:\n    pass\n", 3, "AgentExecutor does not define execute(self, prompt, label, "),
    "execute without arguments": ("class AgentExecutor(AgentExecutorBase):\n    async def execute(self):\n        pass\n", 4, "execute takes (self), but is called as execute(self, prompt, label, "),
    "execute without an engine": ("class AgentExecutor(AgentExecutorBase):\n    async def execute(self, prompt, label, sampling_params):\n        pass\n", 4, "without llm_engine, and AgentExecutor is made without one"),
    "no step": (f"class AgentInstance(AgentInstanceBase):\n    def __init__(self):\n        pass\n{MULTI_TURN}", 3, "AgentInstance does not define step"),
    "no step at all": (f"class AgentInstance:\n    pass\n{MULTI_TURN}", 3, "AgentInstance does not define step(self, states, **kwargs)"),
    "no __init__": (f"class AgentInstance(AgentInstanceBase):\n    async def step(self, states):\n        pass\n{MULTI_TURN}", 3, "AgentInstance does not define __init__"),
    "an instance that wants arguments": (env().replace("def __init__(self):\n        self.n", "def __init__(self, task):\n        self.n"), 3, "AgentInstance is made without arguments, but takes (task)"),
    "a step without states": (env().replace("def step(self, states)", "def step(self)"), 8, "step is called with one argument, states, but takes (self)"),
    "a step of the oldest kind": (env().replace("def step(self, states)", "def step(self, observation, action, label)"), 8, "step is called with one argument, states, but takes (self, observation, action, label)"),
    "a reset without states": (env().replace("def reset(self, states)", "def reset(self)"), 6, "reset is called with one argument, states, but takes (self)"),
}  # fmt: skip
"""What is wrong → (file after HEAD, line that is named, text). HEAD has two lines."""

RAISING = {
    "the instance's __init__ raises": (env(init="raise ValueError('bad\\nluck')"), 5, "(in __init__): ValueError: bad luck"),
    "reset raises": (env(reset="return states['prompt']"), 7, "(in reset): KeyError: 'prompt'"),
    "step raises": (env("return 1 / 0"), 9, "(in step): ZeroDivisionError: division by zero"),
    "step exits": (env("exit(3)"), 9, "(in step): SystemExit: 3"),
    "step cancels itself": (env("import asyncio; raise asyncio.CancelledError"), 9, "(in step): CancelledError"),
    "execute raises": (execute("return missing_name"), 8, "(in execute): NameError: name 'missing_name' is not defined"),
    "execute asks with text": (execute("await llm_engine.generate(prompt, sampling_params)"), 8, "BadValueError: prompt_token_ids must be token ids, got text: 'ask' (str)"),
    "execute asks with nothing": (execute("await llm_engine.generate([], sampling_params)"), 8, "ValueError: prompt_token_ids is empty"),
    "execute asks with text tokens": (execute("await llm_engine.generate(['a'], sampling_params)"), 8, "BadValueError: prompt_token_ids[0] must be a token id, got 'a' (str)"),
    "execute asks beyond the limit": (execute("await llm_engine.generate(tokens * 99, sampling_params)"), 8, "ValueError: 495 prompt tokens leave no room for an answer in 100 tokens"),
    "execute asks without parameters": (execute("await llm_engine.generate(ids, {'temperature': 1})"), 8, "BadValueError: sampling_params must be sampling parameters"),
    "execute asks for what no engine does": (execute("from types import SimpleNamespace as P; await llm_engine.generate(ids, P(temperature=1, n=4))"), 8, "BadValueError: sampling_params cannot be used: n must be 1 (call n times instead), got 4"),
    "execute shows pictures": (execute("await llm_engine.generate(ids, sampling_params, multi_modal_data={'image': 1})"), 8, "ValueError: multi_modal_data has 1 images, but the policy of this run reads no images: it needs a model that does"),
}  # fmt: skip

RETURNING = {
    "reset returns nothing": (env(reset="pass"), 6, "reset returned None: is a `return` missing?"),
    "reset returns text": (env(reset="return 'hello'"), 6, "reset must return a dict, got 'hello' (str)"),
    "reset without observation": (env(reset="return {'label': 1}"), 6, "reset returned a dict without 'observation', with 'label'"),
    "an observation that is no text": (env(reset="return {'observation': ['a']}"), 6, "reset's 'observation' must be text, got ['a'] (list of 1)"),
    "an empty observation": (env(reset="return {'observation': ''}"), 6, "reset's 'observation' is empty"),
    "step returns nothing": (env("pass"), 8, "step returned None: is a `return` missing?"),
    "step returns a tuple": (env("return 1.0, True"), 8, "step must return a dict, got (1.0, True) (tuple of 2)"),
    "step without rewards": (env("return {'reward': 1, 'done': True}"), 8, "step returned a dict without 'rewards', with 'reward', 'done'"),
    "step without done": (env("return {'rewards': 1}"), 8, "step returned a dict without 'done', with 'rewards'"),
    "no reward": (env("return {'rewards': None, 'done': True}"), 8, "step's 'rewards' must be one number, got None"),
    "a reward in words": (env("return {'rewards': 'high', 'done': True}"), 8, "step's 'rewards' must be one number, got 'high' (str)"),
    "two rewards": (env("return {'rewards': torch.tensor([1., 2.]), 'done': True}"), 8, "step's 'rewards' must be one number, got tensor([1., 2.]) (Tensor of shape (2,))"),
    "a reward that is no number": (env("return {'rewards': float('nan'), 'done': True}"), 8, "step's 'rewards' must be finite, got nan (float)"),
    "a reward too large": (env("return {'rewards': 1e40, 'done': True}"), 8, "step's 'rewards' is too large for a float32: 1e+40 (float)"),
    "done in words": (env("return {'rewards': 1, 'done': 'yes'}"), 8, "step's 'done' must be True or False, got 'yes' (str)"),
    "done not decided": (env("return {'rewards': 1, 'done': None}"), 8, "step's 'done' must be True or False, got None"),
    "feedback that is no text": (env("return {'rewards': 1, 'done': True, 'environment_feedback': {'role': 'user'}}"), 8, "step's 'environment_feedback' must be text, got {'role': 'user'} (dict)"),
    "a score in words": (env("return {'rewards': 1, 'done': True, 'scores': 'A'}"), 8, "step's 'scores' must be one number, got 'A' (str)"),
    "logs that are no dict": (env("return {'rewards': 1, 'done': True, 'extra_logs': [1]}"), 8, "step's 'extra_logs' must be a dict of numbers, got [1] (list of 1)"),
    "a log in words": (env("return {'rewards': 1, 'done': True, 'extra_logs': {'a': 'b'}}"), 8, "step's 'extra_logs'['a'] must be one number, got 'b' (str)"),
    "parameters that are none": (env("return {'rewards': 1, 'done': True, 'sampling_params': 'hot'}"), 8, "step's 'sampling_params' must be sampling parameters"),
    "parameters that cannot be": (env("states['sampling_params'].temperature = -1; return {'rewards': 1, 'done': True, 'sampling_params': states['sampling_params']}"), 8, "step's 'sampling_params' cannot be used: temperature must be >= 0 and finite, got -1.0"),
    "a limit in words": (env("states['sampling_params'].max_tokens = '9'; return {'rewards': 1, 'done': True, 'sampling_params': states['sampling_params']}"), 8, "step's 'sampling_params'.max_tokens must be a whole number, got '9' (str)"),
    "pictures that are no list": (env("return {'rewards': 1, 'done': True, 'environment_images': 'cat.png'}"), 8, "step's 'environment_images' must be a list of pictures, got 'cat.png' (str)"),
    "execute returns nothing": (execute("pass"), 4, "execute returned None: is a `return` missing?"),
    "execute returns a list": (execute("return tokens"), 4, "execute must return a dict, got ["),
    "no reward key": (execute("return {'rewards': 1}"), 4, "execute returned a dict without 'reward', with 'rewards'"),
    "a reward in a string": (answer(reward="'1'"), 4, "execute's 'reward' must be one number, got '1' (str)"),
    "tokens without ranges": (execute("return {'observation_tokens': tokens, 'reward': 1}"), 4, "execute returned 'observation_tokens' without 'action_ranges': give both, or neither"),
    "tokens that are text": (answer(observation_tokens="prompt"), 4, "execute's 'observation_tokens' must be token ids, got text: 'ask' (str)"),
    "tokens that are floats": (answer(observation_tokens="[1.5, 2]"), 4, "execute's 'observation_tokens'[0] must be a token id, got 1.5 (float)"),
    "a negative token": (answer(observation_tokens="[-100, *tokens]"), 4, "execute's 'observation_tokens'[0] must be a token id, got -100"),
    "a token nobody knows": (answer(observation_tokens="[0x110000, *tokens[1:]]"), 4, "execute's 'observation_tokens'[0] is 1114112, but the tokenizer has 1114112 tokens"),
    "a single number for ranges": (answer(action_ranges="3"), 4, "execute's 'action_ranges' must be a list of (start, end) pairs, got 3 (int)"),
    "ranges that are no pairs": (answer(action_ranges="[3, 5]"), 4, "execute's 'action_ranges'[0] must be a (start, end) pair of token indices, got 3 (int)"),
    "no ranges": (answer(action_ranges="[]"), 4, "execute's 'action_ranges' is empty: an episode without an action teaches nothing"),
    "an empty range": (answer(action_ranges="[(3, 3)]"), 4, "execute's 'action_ranges'[0] = (3, 3) is empty"),
    "a range from the first token": (answer(action_ranges="[(0, 2)]"), 4, "execute's 'action_ranges'[0] = (0, 2) begins at token 0"),
    "a range beyond the end": (answer(action_ranges="[(3, 9)]"), 4, "execute's 'action_ranges'[0] = (3, 9) goes beyond the 5 'observation_tokens'"),
    "ranges out of order": (answer(action_ranges="[(3, 4), (1, 2)]"), 4, "execute's 'action_ranges'[1] = (1, 2) begins before execute's 'action_ranges'[0] = (3, 4)"),
    "ranges that overlap": (answer(action_ranges="[(2, 4), (3, 5)]"), 4, "execute's 'action_ranges'[1] = (3, 5) overlaps execute's 'action_ranges'[0] = (2, 4)"),
    "too few log-probs": (answer(rollout_log_probs="[-1.0]"), 4, "execute's 'rollout_log_probs' has 1 values for 5 tokens, 2 of them actions"),
    "a log-prob that is none": (answer(rollout_log_probs="[-1.0, float('-inf')]"), 4, "execute's 'rollout_log_probs' of token 4 must be finite, got -inf (float)"),
    "probabilities for log-probs": (answer(rollout_log_probs="[0.5, 0.9]"), 4, "execute's 'rollout_log_probs' of token 3 is 0.5, but a log-prob is at most 0"),
    "turn rewards of another number": (answer(turn_rewards="[1, 1]"), 4, "execute's 'turn_rewards' has 2 values for 1 'action_ranges'"),
    "turn rewards without a reward": (answer(turn_rewards="[1]", reward="None"), 4, "execute's 'turn_rewards' are given, but 'reward' is None"),
    "everything beyond the limit": (answer(observation_tokens="tokens * 40", action_ranges="[(150, 152)]"), 4, "execute's first action begins at token 150, but max_length is 100"),
    "truncated in words": (answer(truncated="'no'"), 4, "execute's 'truncated' must be True or False, got 'no' (str)"),
    "nothing asked, nothing given": ("class AgentExecutor(AgentExecutorBase):\n    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):\n        return {'reward': 1}\n", 4, "execute returned no 'observation_tokens' and never called llm_engine.generate"),
    "two results on the queue": ("class AgentExecutor(AgentExecutorBase):\n    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):\n        self.result_queue = result_queue\n    async def execute(self, prompt, label, sampling_params):\n        await self.result_queue.put({})\n        await self.result_queue.put({})\n", 6, "execute put 2 results on result_queue for one episode"),
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return tmp_path / "agent.py"


def play(file, source: str):
    file.write_text(HEAD + source)
    player = load_agent(file)
    return asyncio.run(player.play("ask", "", SamplingParams(seed=1), 100, CharTokenizer(), says("12")))


def check_message(error: BaseException, file, line: int | None, text: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert message.startswith(f"{file}:{line}" if line else str(file)), message
    assert text in message


@pytest.mark.parametrize("name", LOADING)
def test_a_file_that_cannot_work_is_refused_when_it_is_loaded(file, name):
    source, line, text = LOADING[name]
    file.write_text(HEAD + source)
    with pytest.raises(UserFileError) as caught:
        load_agent(file)
    check_message(caught.value, file, line, text)


@pytest.mark.parametrize("name", RAISING)
def test_an_error_in_an_episode_names_its_line(file, name):
    source, line, text = RAISING[name]
    with pytest.raises(AgentError) as caught:
        play(file, source)
    assert not isinstance(caught.value, AgentResultError)  # another attempt may succeed
    check_message(caught.value, file, line, text)


@pytest.mark.parametrize("name", RETURNING)
def test_user_values_that_cannot_be_used_are_shown_with_the_expected_form(file, name):
    source, line, text = RETURNING[name]
    with pytest.raises(AgentResultError) as caught:
        play(file, source)
    check_message(caught.value, file, line, text)


def test_user_file_mistakes_have_messages_of_their_own():
    texts = [text for table in (RAISING, RETURNING) for _, _, text in table.values()]
    assert len(set(texts)) == len(texts)


def test_the_unbroken_agents_of_these_tables_play(file):
    assert play(file, env()).reward == 1.0
    assert play(file, answer()).reward == 1.0


def test_a_broken_instance_of_a_wired_executor(file):
    """Its class is known only once an episode has its engine."""
    source = textwrap.dedent(
        """\
        class AgentInstance(AgentInstanceBase):
            def __init__(self):
                pass
        class AgentExecutor(AgentExecutorBase):
            def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
                super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
        """
    )
    with pytest.raises(AgentResultError) as caught:
        play(file, source)
    check_message(caught.value, file, 3, "AgentInstance does not define step")


def test_long_values_are_cut(file):
    with pytest.raises(AgentResultError) as caught:
        play(file, env("return {'rewards': 'x' * 10_000, 'done': True}"))
    assert len(str(caught.value)) < 400
