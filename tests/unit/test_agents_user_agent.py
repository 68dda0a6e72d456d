"""Users' agent files, in every shape that documents show, as real files."""

import asyncio
import textwrap

import numpy as np
import pytest
import torch
from scripted_engine import CharTokenizer, ScriptedEngine, says
from vision_models import image, vision_tokenizer

from openrlhf.agents.images import BadImageError
from openrlhf.agents.results import parse_step
from openrlhf.agents.user_agent import load_agent
from openrlhf.agents.user_calls import AgentResultError
from openrlhf.agents.values import as_sampling_params
from openrlhf.types import SamplingParams
from openrlhf.utils.agent import AgentExecutorBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from openrlhf.utils.randomness import derive_seed

HEAD = """
import asyncio
import numpy as np
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
"""

INSTANCE = """
class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turn += 1
        return {"rewards": torch.tensor(0.5), "environment_feedback": "!", "done": self.turn == 2}
"""

EXECUTOR = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

WIRED = """
class AgentExecutor(AgentExecutorBase):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)
"""


@pytest.fixture
def agent(tmp_path):
    def load(*parts: str):
        file = tmp_path / "agent.py"
        file.write_text(HEAD + "".join(textwrap.dedent(part) for part in parts))
        return load_agent(file)

    return load


def play(player, engine, *, prompt="ask", label="", params=None, max_length=100, max_steps=None, images=None):
    params = params or SamplingParams(seed=7)
    return asyncio.run(
        player.play(prompt, label, params, max_length, CharTokenizer(), engine, images, max_steps=max_steps)
    )


def shown(episode) -> list[str]:
    """Each segment as text, sampled tokens in brackets."""
    texts = []
    for segment in episode.segments:
        text, inside = "", False
        for token, action in zip(segment.token_ids.tolist(), segment.action_mask.tolist(), strict=True):
            text += "[" * (action and not inside) + "]" * (inside and not action) + chr(token)
            inside = action
        texts.append(text + "]" * inside)
    return texts


def turn_rewards(episode) -> list[float]:
    return [reward for segment in episode.segments for reward in segment.turn_rewards.tolist() if reward]


# Shapes of the instance and of the executor -------------------------------------------------------------------------

SYNC_INSTANCE = """
class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turn = 0

    def reset(self, states):
        return {"observation": states["observation"]}

    def step(self, states):
        self.turn += 1
        return {"rewards": 0.5, "environment_feedback": "!", "done": self.turn == 2}
"""
ASYNC_INIT = """
class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        await asyncio.sleep(0)
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        return {"rewards": torch.tensor([0.5]), "environment_feedback": "!", "done": torch.tensor(self.turn == 2)}
"""
PLAIN_CLASS = """
class AgentInstance:
    turn = 0

    async def step(self, states):
        self.turn += 1
        return {"rewards": 0.5, "environment_feedback": "!", "done": int(self.turn == 2)}
"""
WIRED_ANYTHING = """
class AgentExecutor(AgentExecutorBase):
    def __init__(self, *args, **kwargs):
        super().__init__(AgentInstance, *args, **kwargs)
"""
WIRED_SUPER = """
    async def execute(self, prompt, label, sampling_params):
        return await super().execute(prompt, label, sampling_params)
"""
WIRED_SUPER_WITHOUT_RETURN = """
    async def execute(self, prompt, label, sampling_params):
        await super().execute(prompt, label, sampling_params)
"""
OWN_LOOP = """
        instance = AgentInstance()
        tokens = {tokenizer}(prompt, add_special_tokens=False)["input_ids"]
        ranges, total, text = [], 0.0, prompt
        for _ in range({steps}):
            output = await {engine}.generate(tokens, sampling_params)
            action = {ids}
            ranges.append((len(tokens), len(tokens) + len(action)))
            tokens = tokens + list(action)
            said = {tokenizer}.decode(action)
            result = await instance.step({{
                "observation_text": text, "action_text": said, "label": label, "sampling_params": sampling_params,
            }})
            total += result["rewards"]
            text += said + result["environment_feedback"]
            if result["done"]:
                break
            tokens = tokens + {tokenizer}(result["environment_feedback"], add_special_tokens=False)["input_ids"]
        answer = {{
            "prompt": prompt, "label": label, "observation_tokens": tokens, "action_ranges": ranges,
            "rollout_log_probs": None, "reward": total, "scores": total, "extra_logs": {{}},
        }}
"""
WIRED_OWN = (
    """
    async def execute(self, prompt, label, sampling_params):
"""
    + OWN_LOOP.format(
        tokenizer="self.hf_tokenizer", steps="self.max_steps", engine="self.llm_engine", ids="output.token_ids"
    )
    + """
        await self.result_queue.put(answer)
"""
)
FULL_OWN = (
    """
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
"""
    + OWN_LOOP.format(tokenizer="hf_tokenizer", steps="9", engine="llm_engine", ids="output.token_ids")
    + """
        return answer
"""
)
BASE_SUBCLASS_OF_MULTI_TURN = """
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self, max_steps, max_length, llm_engine, hf_tokenizer, result_queue):
        super().__init__(AgentInstance)
"""

SHAPES = {
    "as documented": (INSTANCE, EXECUTOR),
    "nothing is async": (SYNC_INSTANCE, EXECUTOR),
    "async __init__": (ASYNC_INIT, EXECUTOR),
    "a class of its own": (PLAIN_CLASS, EXECUTOR),
    "wired, no execute": (INSTANCE, WIRED),
    "wired with anything": (INSTANCE, WIRED_ANYTHING),
    "wired, async __init__": (ASYNC_INIT, WIRED),
    "wired, execute calls super": (INSTANCE, WIRED + WIRED_SUPER),
    "wired, execute calls super and returns nothing": (INSTANCE, WIRED + WIRED_SUPER_WITHOUT_RETURN),
    "wired, execute of its own puts its result": (INSTANCE, WIRED + WIRED_OWN),
    "wired, puts without waiting": (INSTANCE, WIRED + WIRED_OWN.replace("await self.result_queue.put(", "self.result_queue.put_nowait(")),
    "wired, returns": (INSTANCE, WIRED + WIRED_OWN.replace("await self.result_queue.put(answer)", "return answer")),
    "wired multi turn": (INSTANCE, BASE_SUBCLASS_OF_MULTI_TURN),
    "execute of its own": (INSTANCE, FULL_OWN),
    "execute without images": (INSTANCE, FULL_OWN.replace(", images=None", "")),
    "execute with other names": (INSTANCE, FULL_OWN.replace("label, sampling_params, max_length", "label, sampling_params, limit")),
    "execute with kwargs": (INSTANCE, FULL_OWN.replace("max_length, hf_tokenizer, llm_engine, images=None", "hf_tokenizer, llm_engine, **kwargs")),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_plays_the_same_episode(agent, shape):
    """ "12", feedback "!", "3", done: tokens, versions, log-probs and seeds do not depend on how the class is written."""
    player, engine = agent(*SHAPES[shape]), says("12", "3")
    params = SamplingParams(seed=7, max_tokens=10)
    episode = play(player, engine, params=params)
    assert shown(episode) == ["ask[12]![3]"]
    (segment,) = episode.segments
    assert segment.versions.tolist() == [-1, -1, -1, 0, 0, -1, 1]
    assert segment.rollout_logprobs.tolist() == pytest.approx([0, 0, 0, 0, -0.01, 0, -1.0])
    assert (episode.reward, episode.score, episode.truncated, episode.unmatched_ranges) == (1.0, 1.0, False, 0)
    assert sum(turn_rewards(episode)) == 1.0
    assert [asked.seed for _, asked in engine.asked] == [derive_seed(7, "turn", 0), derive_seed(7, "turn", 1)]
    assert params == SamplingParams(seed=7, max_tokens=10)


@pytest.mark.parametrize("shape", [name for name, parts in SHAPES.items() if "instance.step(" not in "".join(parts)])
def test_turn_rewards_stay_where_they_were_earned(agent, shape):
    """In every shape whose turns we play; a dict from a loop of the user's own says what it says."""
    episode = play(agent(*SHAPES[shape]), says("12", "3"))
    assert episode.segments[0].turn_rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 0.5]


@pytest.mark.parametrize(
    "shape", ["as documented", "wired, no execute", "wired, execute calls super", "wired multi turn"]
)
def test_the_turn_limit_holds_in_every_shape(agent, shape):
    episode = play(agent(*SHAPES[shape]), says("12", "3"), max_steps=1)
    assert (shown(episode), episode.truncated) == (["ask[12]"], True)


def test_an_unlimited_wired_agent_can_count_to_its_limit(agent):
    """Their loops say `range(self.max_steps)`, so it is a number also when the run has none."""
    assert shown(play(agent(INSTANCE, WIRED + WIRED_OWN), says("1"), max_steps=None)) == ["ask[1]![1]"]


def test_wired_executors_do_not_mix_their_episodes(agent):
    player = agent(INSTANCE, WIRED + WIRED_OWN)

    async def play_all():
        engine = ScriptedEngine(lambda prompt, params: prompt[:1])
        params = SamplingParams(seed=0)
        return await asyncio.gather(*(player.play(f"{i}?", "", params, 50, CharTokenizer(), engine) for i in range(6)))

    for i, episode in enumerate(asyncio.run(play_all())):
        assert shown(episode) == [f"{i}?[{i}]![{i}]"]


def test_an_executor_may_add_to_what_ours_return(agent):
    """A bonus on top of the turn rewards 0.5 and 0.5 stands on the last action token."""
    player = agent(
        INSTANCE,
        EXECUTOR,
        """
        class AgentExecutor(AgentExecutor):
            async def execute(self, *args, **kwargs):
                result = await super().execute(*args, **kwargs)
                result["reward"] += 2
                return result
        """,
    )
    episode = play(player, says("12", "3"), max_steps=5)
    assert episode.segments[0].turn_rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 2.5]
    assert episode.reward == 3.0
    assert play(player, says("12", "3"), max_steps=1).truncated


def test_a_single_turn_executor_may_judge_its_own_answer(agent):
    player = agent(
        """
        class AgentExecutor(SingleTurnAgentExecutor):
            async def execute(self, *args, **kwargs):
                result = await super().execute(*args, **kwargs)
                return {**result, "reward": torch.tensor([0.25]), "extra_logs": {"length": np.int64(3)}}
        """
    )
    episode = play(player, says("12"))
    assert (shown(episode), episode.reward, episode.extra_logs) == (["ask[12]"], 0.25, {"length": 3.0})
    assert turn_rewards(episode) == [0.25]


def test_the_plain_single_turn_executor_leaves_the_reward_to_others(agent):
    episode = play(agent("class AgentExecutor(SingleTurnAgentExecutor):\n    pass\n"), says("12"))
    assert (shown(episode), episode.reward, episode.score) == (["ask[12]"], None, None)


def test_neighbours_of_the_file_can_be_imported(agent, tmp_path):
    (tmp_path / "rules_of_the_game.py").write_text("FEEDBACK = '?'")
    player = agent("from rules_of_the_game import FEEDBACK\n", INSTANCE.replace('"!"', "FEEDBACK"), EXECUTOR)
    assert shown(play(player, says("1"))) == ["ask[1]?[1]"]


def test_the_public_names():
    assert issubclass(MultiTurnAgentExecutor, AgentExecutorBase)
    assert issubclass(SingleTurnAgentExecutor, AgentExecutorBase)
    assert AgentExecutorBase.__abstractmethods__ == {"execute"}


def answers(result: str) -> str:
    """An environment whose every step returns `result`."""
    return f"""
class AgentInstance(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, states, **kwargs):
        return {result}
"""


# Values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ["0.5", "torch.tensor(0.5)", "torch.tensor([0.5], requires_grad=True)", "torch.tensor([[0.5]])", "np.float64(0.5)",
     "np.array([0.5])", "[0.5]", "torch.tensor(0.5, dtype=torch.bfloat16)"],
)  # fmt: skip
def test_rewards_scores_and_logs_in_any_form(agent, value):
    answer = f'{{"rewards": {value}, "scores": {value}, "done": True, "extra_logs": {{"log": {value}}}}}'
    episode = play(agent(answers(answer), EXECUTOR), says("1"))
    assert (episode.reward, episode.score, episode.extra_logs) == (0.5, 0.5, {"log": 0.5})


@pytest.mark.parametrize("value", ["True", "1", "np.bool_(True)", "torch.tensor(True)", "torch.tensor([1])"])
def test_done_and_rewards_that_are_flags(agent, value):
    engine = says("1")
    episode = play(agent(answers(f'{{"rewards": {value}, "done": {value}}}'), EXECUTOR), engine)
    assert (episode.reward, len(engine.asked)) == (1.0, 1)


def test_keys_of_extra_logs_may_differ_between_samples(agent):
    player = agent(
        answers('{"rewards": 0, "done": True, "extra_logs": {states["action_text"]: 1}}'),
        EXECUTOR,
    )
    assert play(player, says("a")).extra_logs == {"a": 1.0}
    assert play(player, says("b")).extra_logs == {"b": 1.0}


# What execute returns -----------------------------------------------------------------------------------------------


def executor(body: str) -> str:
    head = "class AgentExecutor(AgentExecutorBase):\n    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):\n"
    return head + textwrap.indent(textwrap.dedent(body), " " * 8)


ASK = """
ids = hf_tokenizer(prompt)["input_ids"]
said = (await llm_engine.generate(ids, sampling_params)).token_ids
tokens, ranges = ids + said, [(len(ids), len(ids) + len(said))]
"""


@pytest.mark.parametrize(
    ("tokens", "ranges"),
    [
        ("tokens", "ranges"),
        ("torch.tensor(tokens)", "torch.tensor(ranges)"),
        ("torch.tensor([tokens])", "np.array(ranges)"),
        ("tuple(tokens)", "tuple(ranges)"),
        ("np.array(tokens)", "[list(r) for r in ranges]"),
    ],
)
def test_tokens_and_ranges_in_any_form(agent, tokens, ranges):
    player = agent(executor(ASK + f'return {{"observation_tokens": {tokens}, "action_ranges": {ranges}, "reward": 1}}'))
    assert shown(play(player, says("12"))) == ["ask[12]"]


@pytest.mark.parametrize(
    "logprobs",
    ["[9, 9, 9, -1.5, -2.5, 9]", "[-1.5, -2.5]", "torch.tensor([-1.5, -2.5])", "[None] * 3 + [-1.5, -2.5, None]"],
)
def test_given_logprobs_stand_by_token_or_by_action_token(agent, logprobs):
    body = f'return {{"observation_tokens": tokens + [33], "action_ranges": ranges, "reward": 1, "rollout_log_probs": {logprobs}}}'
    (segment,) = play(agent(executor(ASK + body)), says("12")).segments
    assert segment.rollout_logprobs.tolist() == [0, 0, 0, -1.5, -2.5]


def test_an_answer_may_be_cut_by_its_reader(agent):
    """The engine said "12345"; the executor kept "12". Their log-probs and versions are known; nothing was truncated."""
    body = 'return {"observation_tokens": tokens[:5], "action_ranges": [(3, 5)], "reward": 1}'
    episode = play(agent(executor(ASK + body)), says("12345x"), params=SamplingParams(max_tokens=5))
    assert episode.segments[0].rollout_logprobs.tolist() == pytest.approx([0, 0, 0, 0, -0.01])
    assert (shown(episode), episode.truncated, episode.unmatched_ranges) == (["ask[12]"], False, 0)
    whole = 'return {"observation_tokens": tokens, "action_ranges": ranges, "reward": 1}'
    assert play(agent(executor(ASK + whole)), says("12345x"), params=SamplingParams(max_tokens=5)).truncated


def test_tokens_that_no_call_gave_are_counted(agent):
    """Two ranges, the second made up: its version is the engine's, its log-prob unknown, so the column is."""
    body = 'return {"observation_tokens": tokens + [33, 65], "action_ranges": [*ranges, (6, 7)], "reward": 1}'
    episode = play(agent(executor(ASK + body)), says("12"))
    assert (shown(episode), episode.unmatched_ranges) == (["ask[12]![A]"], 1)
    assert episode.segments[0].rollout_logprobs is None
    assert episode.segments[0].versions.tolist() == [-1, -1, -1, 0, 0, -1, 0]


def test_the_best_of_several_answers_is_told_apart_from_the_others(agent):
    """Four answers to one prompt, each with randomness of its own; the third is kept: version 2, its log-probs."""
    body = """
        ids = hf_tokenizer(prompt)["input_ids"]
        outputs = await asyncio.gather(*(llm_engine.generate(ids, sampling_params) for _ in range(4)))
        best = outputs[2].token_ids
        return {"observation_tokens": ids + best, "action_ranges": [(3, 3 + len(best))], "reward": 1}
    """
    engine = says("1a", "1b", "1c", "1")
    engine.says = lambda prompt, params: [49, 97 + [p.seed for _, p in engine.asked].index(params.seed)]
    episode = play(agent(executor(body)), engine)
    assert len({params.seed for _, params in engine.asked}) == 4
    assert shown(episode) == ["ask[1c]"]
    assert episode.segments[0].versions.tolist() == [-1, -1, -1, 2, 2]


def test_turn_rewards_may_be_given_per_range(agent):
    body = """
        ids = hf_tokenizer(prompt)["input_ids"]
        first = (await llm_engine.generate(ids, sampling_params)).token_ids
        tokens = ids + first + [33]
        second = (await llm_engine.generate(prompt_token_ids=torch.tensor(tokens), sampling_params=sampling_params)).token_ids
        return {"observation_tokens": tokens + second, "action_ranges": [(3, 5), (6, 7)], "reward": 2, "turn_rewards": [0.5, 1]}
    """
    episode = play(agent(executor(body)), says("12", "3"))
    assert episode.segments[0].turn_rewards.tolist() == [0, 0, 0, 0, 0.5, 0, 1.5]


def test_user_agent_tokens_are_cut_at_the_limit_and_after_the_last_action(agent):
    """max_length 6: "ask12!" keeps "ask12"; of two actions beyond it the reward moves to the last one kept."""
    body = """
        ids = hf_tokenizer(prompt)["input_ids"]
        said = (await llm_engine.generate(ids, sampling_params)).token_ids
        return {"observation_tokens": ids + said + [33] + [65, 66] + [63], "action_ranges": [(3, 5), (6, 8)], "reward": 1}
    """
    episode = play(agent(executor(body)), says("12"), max_length=6)
    assert (shown(episode), turn_rewards(episode), episode.truncated) == (["ask[12]"], [1.0], True)
    assert episode.text == "ask12!AB?"
    episode = play(agent(executor(body)), says("12"), max_length=7)
    assert (shown(episode), turn_rewards(episode), episode.truncated) == (["ask[12]![A]"], [1.0], True)
    episode = play(agent(executor(body)), says("12"), max_length=8)
    assert (shown(episode), turn_rewards(episode), episode.truncated) == (["ask[12]![AB]"], [1.0], False)


def test_user_agent_without_tokens_is_recorded_from_its_engine_calls(agent):
    """Older executors return text; what was sampled is known all the same, and a rewritten history gives two segments."""
    body = """
        ids = hf_tokenizer(prompt)["input_ids"]
        first = (await llm_engine.generate(ids, sampling_params)).token_ids
        await llm_engine.generate(ids + first + [33], sampling_params)
        await llm_engine.generate([65, 66], sampling_params)
        return {"observation": "some text", "reward": 1, "scores": 0.5}
    """
    episode = play(agent(executor(body)), says("12", "3", "4"))
    assert shown(episode) == ["ask[12]![3]", "AB[4]"]
    assert (turn_rewards(episode), episode.reward, episode.score) == ([1.0], 1.0, 0.5)
    assert episode.segments[1].turn_rewards.tolist() == [0, 0, 1.0]


def test_vllm_parameters_are_understood(agent):
    """A user's own parameters in vLLM's terms; limits, log-probs and randomness of the run hold all the same."""
    body = """
        class Params:
            n, temperature, top_p, top_k, max_tokens, min_tokens = 1, 0.5, 0.9, 0, 50, 1
            stop, stop_token_ids, seed, logprobs, repetition_penalty = ["x"], [], None, None, 1.0
        ids = hf_tokenizer(prompt)["input_ids"]
        said = (await llm_engine.generate(ids, Params())).token_ids
        return {"observation_tokens": ids + said, "action_ranges": [(3, 3 + len(said))], "reward": 1}
    """
    engine = says("12")
    episode = play(agent(executor(body)), engine, max_length=20)
    assert engine.asked[0][1] == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=-1, max_tokens=17, min_tokens=1, stop=("x",), seed=derive_seed(7, "turn", 0)
    )
    assert episode.segments[0].rollout_logprobs is not None


def test_user_agent_passes_all_sampling_parameters_on():
    given = SamplingParams(
        temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2,
        frequency_penalty=0.3, max_tokens=4, min_tokens=2, stop=("x", "y"), stop_token_ids=[3], ignore_eos=True, seed=5,
        logprobs=False, include_stop_str_in_output=True, skip_special_tokens=False,
    )  # fmt: skip
    copy = as_sampling_params(given, what="sampling_params")
    assert copy == given
    assert copy is not given


def test_an_error_of_the_engine_is_not_blamed_on_the_user(agent):
    class Broken(ScriptedEngine):
        async def generate(self, token_ids, sampling_params, images=()):
            raise ConnectionError("the engine is gone")

    for player in (agent(executor(ASK)), agent(INSTANCE, WIRED + WIRED_OWN), agent(INSTANCE, EXECUTOR)):
        with pytest.raises(ConnectionError, match="the engine is gone"):
            play(player, Broken(lambda *_: []))


def test_an_episode_that_is_given_up_is_cancelled_not_failed(agent):
    player = agent(INSTANCE.replace("self.turn += 1", "await asyncio.sleep(60)"), EXECUTOR)

    async def give_up():
        task = asyncio.create_task(player.play("ask", "", SamplingParams(seed=1), 50, CharTokenizer(), says("1")))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())


def test_numbers_are_float32_from_the_start():
    assert parse_step({"rewards": 0.1, "done": False}).reward == np.float32(0.1)
    assert parse_step({"rewards": torch.tensor(0.1, dtype=torch.float64), "done": False}).reward == np.float32(0.1)


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("", False),
        ("SHARED_LOOP = True", True),
        ("slots = asyncio.Semaphore(4)", True),
        ("slots = asyncio.Semaphore(4)\nSHARED_LOOP = False", False),
        ("class Client:\n    lock = asyncio.Lock()", True),
        ("class AgentExecutor(AgentExecutor):\n    def __init__(self):\n        super().__init__()\n"
         "        self.slots = asyncio.Semaphore(4)", True),
    ],
)  # fmt: skip
def test_episodes_share_a_loop_when_the_file_says_so_or_keeps_what_belongs_to_one(agent, text, shared):
    assert agent(INSTANCE, EXECUTOR, text).shared_loop is shared


# Images -------------------------------------------------------------------------------------------------------------

LOOKS = """
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        import io
        from PIL import Image
        is_vlm = hasattr(hf_tokenizer, "image_processor")
        assert is_vlm and all(isinstance(picture, Image.Image) for picture in images)
        made = hf_tokenizer(text=[prompt], images=images, return_tensors="pt", add_special_tokens=False)
        whole = made["input_ids"][0].tolist()
        once = hf_tokenizer.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        said = (await llm_engine.generate(FORM, sampling_params, multi_modal_data={"image": images})).outputs[0]
        more = hf_tokenizer(" <|vision_start|><|image_pad|><|vision_end|>?", add_special_tokens=False)["input_ids"]
        tokens = FORM + said.token_ids + more
        images = images + [images[0].rotate(90, expand=True)]
        again = (await llm_engine.generate(tokens, sampling_params, multi_modal_data={"image": images})).outputs[0]
        ranges = [(len(FORM), len(FORM) + 2), (len(tokens), len(tokens) + 2)]
        feedback = hf_tokenizer(" <|image_pad|>!")["input_ids"]  # which nobody reads
        result = {"reward": 1.0}
        if RETURNS:
            result["observation_tokens"] = tokens + again.token_ids + feedback
            result["action_ranges"] = ranges
            result["rollout_log_probs"] = [0.0] * len(FORM) + [-1.0, -2.0] + [0.0] * len(more) + [-3.0, -4.0]
            result["rollout_log_probs"] += [0.0] * len(feedback)
            result["turn_rewards"] = [0.25, 0.75]
        return result
"""


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("form", ["once", "whole"])
def test_an_executor_may_show_images_in_either_form_and_what_was_read_is_trained_on(agent, form, returns):
    tokenizer = vision_tokenizer("qwen2_5_vl")
    reader = tokenizer.episode_images
    engine = ScriptedEngine(lambda *_: tokenizer("55")["input_ids"])
    around = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = f"ab{around}{around}"
    pictures = [image(1, width=24), image(2, width=40)]
    player = agent(LOOKS.replace("FORM", form).replace("RETURNS", str(returns)))
    episode = asyncio.run(player.play(prompt, "", SamplingParams(), 500, tokenizer, engine, pictures))

    inputs = [reader.prepare_one(picture) for picture in (*pictures, pictures[0].rotate(90, expand=True))]
    whole = reader.expand(f"{prompt}55 {around}?", inputs)
    (segment,) = episode.segments
    assert segment.token_ids.tolist() == [*whole.token_ids, *tokenizer("55")["input_ids"]]
    assert [(at, shown.digest) for at, shown in segment.images] == [(at, shown.digest) for at, shown in whole.images]
    assert [ids for ids, _ in engine.asked][1] == whole.token_ids
    actions = segment.action_mask.nonzero().flatten().tolist()
    first = len(reader.expand(prompt, inputs[:2]).token_ids)
    assert actions == [first, first + 1, len(whole.token_ids), len(whole.token_ids) + 1]
    assert segment.versions[segment.action_mask].tolist() == [0, 0, 1, 1]
    assert episode.unmatched_ranges == 0
    said = segment.rollout_logprobs[segment.action_mask].tolist()
    assert said == ([-1.0, -2.0, -3.0, -4.0] if returns else pytest.approx([0.0, -0.01, -1.0, -1.01]))
    assert turn_rewards(episode) == ([0.25, 0.75] if returns else [1.0])
    # In the text an image is one token, as in the prompt; what nobody read is told too.
    assert episode.text.startswith(prompt)
    assert episode.text.count("<|image_pad|>") == 3 + returns


def test_tokens_of_images_that_the_engine_never_saw_are_an_error(agent):
    tokenizer = vision_tokenizer("qwen2_5_vl")
    player = agent(
        """
        class AgentExecutor(AgentExecutorBase):
            async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
                said = await llm_engine.generate(hf_tokenizer(prompt)["input_ids"], sampling_params)
                tokens = hf_tokenizer("a<|image_pad|>")["input_ids"] + said.token_ids
                return {"reward": 1, "observation_tokens": tokens, "action_ranges": [(2, 3)]}
        """
    )
    engine = ScriptedEngine(lambda *_: tokenizer("5")["input_ids"])
    with pytest.raises(AgentResultError, match=r"agent.py:\d+.*the images of no call of llm_engine.generate fit them"):
        asyncio.run(player.play("a", "", SamplingParams(), 500, tokenizer, engine))


@pytest.mark.parametrize("base", ["SingleTurnAgentExecutor", "MultiTurnAgentExecutor"])
def test_the_dict_of_an_episode_with_images_is_the_same_episode(agent, base):
    """Our own executors through a user's `execute`, which has the engine that records."""
    tokenizer = vision_tokenizer("llava")
    instance = """
    class AgentInstance(AgentInstanceBase):
        def __init__(self):
            self.turn = 0
        async def step(self, states):
            from PIL import Image
            self.turn += 1
            pictures = [Image.new("RGB", (8, 8), "red")] if self.turn == 1 else []
            return {"rewards": 1, "done": self.turn == 2, "environment_images": pictures}
    """
    made = "def __init__(self):\n            super().__init__(AgentInstance)" if base.startswith("Multi") else ""
    executor = f"""
    class AgentExecutor({base}):
        {made or "pass"}
    """
    through = executor + "    async def execute(self, *args):\n            return await super().execute(*args)\n    "
    found = []
    for source in (executor, through):
        engine = ScriptedEngine(lambda *_: tokenizer("5")["input_ids"])
        player = agent(instance, source)
        found.append(asyncio.run(player.play("ask<image>", "", SamplingParams(), 500, tokenizer, engine, [image(1)])))
    (plain,), (described,) = (episode.segments for episode in found)
    assert plain.token_ids.equal(described.token_ids)
    assert plain.action_mask.equal(described.action_mask)
    assert [(at, picture.digest) for at, picture in plain.images] == [(at, p.digest) for at, p in described.images]
    assert len(plain.images) == (2 if made else 1)
    assert found[0].reward == found[1].reward


def test_a_prompt_with_images_is_not_cut(agent):
    tokenizer = vision_tokenizer("llava")
    player = agent("class AgentExecutor(SingleTurnAgentExecutor):\n    pass\n")
    engine = ScriptedEngine(lambda *_: tokenizer("5")["input_ids"])
    play_it = player.play("a<image>", "", SamplingParams(max_tokens=4), 20, tokenizer, engine, [image(1)])
    with pytest.raises(BadImageError, match="the prompt has 17 tokens with its 1 images, and room for 16"):
        asyncio.run(play_it)
    assert engine.asked == []
