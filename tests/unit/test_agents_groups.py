"""Groups that are played together: environments that are forked, samples that branch, and agents that meet each other."""

import asyncio
import dataclasses
import random
import textwrap

import pytest
from scripted_engine import CharTokenizer, ScriptedEngine

from openrlhf.agents.base import Episode, FailedEpisode
from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes
from openrlhf.agents.user_agent import UserFileError, load_agent
from openrlhf.agents.user_calls import AgentError, AgentResultError
from openrlhf.checking.workbench import write_tiny_model
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.types import Fork, Outcome, Prompt, RewardPart, SamplingParams

HEAD = """
import asyncio
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
"""

COUNTING = """
class AgentInstance(AgentInstanceBase):
    fork_after_reset = True
    made = resets = 0

    def __init__(self):
        AgentInstance.made += 1
        self.said = []

    async def reset(self, states):
        AgentInstance.resets += 1
        self.said.append(f"game {AgentInstance.resets}")
        return {"observation": states["observation"] + "|"}

    async def step(self, states):
        self.said.append(states["action_text"])
        if states["action_text"] == "x":
            raise ValueError("an x")
        done = len(self.said) == 3
        return {"rewards": len(set(self.said)), "done": done, "environment_feedback": "."}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""

DUEL = """
class AgentExecutor(AgentExecutorBase):
    '''Two samples play one game: each says a digit, then reads what the other said and says another; the higher sum wins.'''

    async def execute_group(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engines, images=None):
        results = []
        for i in range(0, len(llm_engines), 2):
            results += await self.game(prompt, sampling_params[i : i + 2], hf_tokenizer, llm_engines[i : i + 2])
        return results

    async def game(self, prompt, params, tokenizer, engines):
        tokens = [tokenizer(prompt)["input_ids"] for _ in engines]
        ranges, sums = [[], []], [0, 0]
        for turn in range(2):
            said = [(await e.generate(t, p)).outputs[0] for e, t, p in zip(engines, tokens, params)]
            for i in range(2):
                ranges[i].append((len(tokens[i]), len(tokens[i]) + 1))
                sums[i] += int(said[i].text or chr(said[i].token_ids[0]))
                tokens[i] = tokens[i] + said[i].token_ids + said[1 - i].token_ids
        return [
            {
                "observation_tokens": tokens[i],
                "action_ranges": ranges[i],
                "reward": float(sums[i] > sums[1 - i]),
                "agent": f"player {i}",
            }
            for i in range(2)
        ]
"""

BRANCHES = """
class AgentExecutor(AgentExecutorBase):
    '''One beginning for all samples, sampled by the first.'''

    async def execute_group(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engines):
        start = hf_tokenizer(prompt)["input_ids"]
        trunk = start + (await llm_engines[0].generate(start, sampling_params[0])).token_ids + [ord("?")]
        results = []
        for i, engine in enumerate(llm_engines):
            tokens = trunk + (await engine.generate(trunk, sampling_params[i])).token_ids
            fork = {"forked_from": (0, len(trunk))} if i else {}
            ranges = [(len(start), len(trunk) - 1), (len(trunk), len(tokens))]
            results.append({"observation_tokens": tokens, "action_ranges": ranges, "reward": float(i), **fork})
        return results
"""


@pytest.fixture
def agent(tmp_path):
    def load(*parts: str):
        file = tmp_path / "agent.py"
        file.write_text(HEAD + "".join(textwrap.dedent(part) for part in parts))
        return load_agent(file)

    return load


def seeded() -> ScriptedEngine:
    """Says a digit that its prompt and its seed decide."""
    return ScriptedEngine(lambda ids, params: [ord(random.Random(f"{ids} {params.seed}").choice("123456"))])


def by_turn(*texts: str) -> ScriptedEngine:
    """Says one of the texts, in the order of calls."""
    answers = iter(texts)
    return ScriptedEngine(lambda ids, params: [ord(c) for c in next(answers)])


def play(player, engine, *, samples=2, prompt="ask", **kwargs):
    params = [SamplingParams(seed=seed) for seed in range(samples)]
    return asyncio.run(player.play_group(prompt, "", params, 100, CharTokenizer(), engine, **kwargs))


def text(episode: Episode) -> str:
    return "".join(map(chr, episode.segments[0].token_ids.tolist()))


def actions(episode: Episode) -> str:
    segment = episode.segments[0]
    return "".join(map(chr, segment.token_ids[segment.action_mask].tolist()))


def test_forked_environments_begin_in_one_state_and_go_their_own_ways(agent):
    """One instance is made and reset. Each sample's rewards count what it has said itself: "game 1", "a", "b" are 2 and
    then 3 different words, "a" twice are 2 and 2."""
    player = agent(COUNTING)
    episodes = play(player, by_turn("a", "a", "b", "a"))
    assert [text(e) for e in episodes] == ["ask|a.b", "ask|a.a"]
    assert [e.reward for e in episodes] == [5.0, 4.0]
    cls = player.executor.agent_instance_cls
    assert (cls.made, cls.resets) == (1, 1)
    assert [e.fork for e in episodes] == [None, None]  # no action token is shared


def test_a_fork_of_ones_own_is_used(agent):
    player = agent(
        COUNTING,
        """
        async def fork(self):
            other = AgentInstance()
            other.said = [*self.said, "forked"]
            return other
        AgentInstance.fork = fork
        """,
    )
    episodes = play(player, seeded(), samples=3)
    assert [len(actions(e)) for e in episodes] == [1, 1, 1]
    assert player.executor.agent_instance_cls.made == 4


@pytest.mark.parametrize(("returned", "expected"), [("self", "one game"), ("None", "return")])
def test_a_fork_that_is_none_is_an_error_with_its_line(agent, returned, expected):
    player = agent(COUNTING, f"AgentInstance.fork = lambda self: {returned}")
    with pytest.raises(AgentResultError, match=expected):
        play(player, seeded())


def test_a_sample_that_fails_fails_alone(agent):
    first, second = play(agent(COUNTING), by_turn("x", "a", "b"))
    assert isinstance(first, FailedEpisode)
    assert "an x" in first.error
    assert "agent.py:" in first.error
    assert text(second) == "ask|a.b"


def test_a_group_fails_where_all_of_its_samples_have(agent):
    with pytest.raises(AgentError, match="an x"):
        play(agent(COUNTING), by_turn("x"), samples=1)


def test_an_own_execute_beside_forks_is_refused(agent):
    with pytest.raises(UserFileError, match="define execute_group"):
        agent(COUNTING, "async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine):"
              "\n    return {}\nAgentExecutor.execute = execute")  # fmt: skip


def test_two_agents_of_a_game_are_two_episodes_with_their_roles(agent):
    """Calls in turn: player 0 says 5, player 1 says 2; then 1 and 3. 6 beats 5."""
    player = agent(DUEL)
    assert player.group_play
    episodes = play(player, by_turn("5", "2", "1", "3"))
    assert [e.agent for e in episodes] == ["player 0", "player 1"]
    assert [text(e) for e in episodes] == ["ask521", "ask253"]  # what follows the last action is left out
    assert [actions(e) for e in episodes] == ["51", "23"]
    assert [e.reward for e in episodes] == [1.0, 0.0]
    versions = [e.segments[0].versions[e.segments[0].action_mask].tolist() for e in episodes]
    assert versions == [[0, 2], [1, 3]]  # each has those of its own calls


def test_randomness_is_that_of_each_sample(agent):
    """The calls of samples have seeds of their own, and the same ones whatever else is in the group."""
    few, many = seeded(), seeded()
    two, four = play(agent(DUEL), few), play(agent(DUEL), many, samples=4)
    seeds = [params.seed for _, params in many.asked]
    assert len(set(seeds)) == len(seeds) == 8
    assert [text(e) for e in four[:2]] == [text(e) for e in two]


def test_branches_know_what_they_share(agent):
    first, second, third = play(agent(BRANCHES), seeded(), samples=3)
    assert [e.fork for e in (first, second, third)] == [None, Fork(0, 1), Fork(0, 1)]
    assert len({text(e)[:5] for e in (first, second, third)}) == 1
    for branch in (second, third):  # tokens that the first has sampled keep its log-probs and versions
        mine, theirs = branch.segments[0], first.segments[0]
        assert mine.rollout_logprobs[:4].tolist() == theirs.rollout_logprobs[:4].tolist()
        assert mine.versions[:4].tolist() == theirs.versions[:4].tolist()
        assert branch.unmatched_ranges == 0


@pytest.mark.parametrize(
    ("fork", "expected"),
    [
        ('(2, 4)', "not before sample 1"),
        ('"first"', r"must be \(sample, tokens\)"),
        ('(0, 6)', "first 6 tokens are those of sample 0: they are not"),
    ],
)  # fmt: skip
def test_wrong_forks_are_named(agent, fork, expected):
    player = agent(BRANCHES.replace("(0, len(trunk))", fork))
    engine = ScriptedEngine(lambda ids, params: [ord("abc"[params.seed % 3] if len(ids) > 3 else "t")])
    params = [SamplingParams(seed=seed) for seed in range(2)]
    with pytest.raises(AgentResultError, match=expected):
        asyncio.run(player.play_group("ask", "", params, 100, CharTokenizer(), engine))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return [{'reward': 1}]", "1 results for 2 samples"),
        ("return {'reward': 1}", "a list with a dict"),
        ("raise KeyError('k')", "KeyError"),
        ("return [{'reward': 1, 'agent': 3, 'observation_tokens': [1, 2], 'action_ranges': [(1, 2)]}] * 2", "a role"),
    ],
)
def test_what_execute_group_may_not_return(agent, body, expected):
    player = agent(f"""
        class AgentExecutor(AgentExecutorBase):
            async def execute_group(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engines):
                {body}
        """)
    with pytest.raises(AgentError, match=expected):
        play(player, seeded())


def test_an_exception_among_the_results_is_that_samples(agent):
    """As `asyncio.gather(…, return_exceptions=True)` gives them."""
    player = agent("""
        class AgentExecutor(AgentExecutorBase):
            async def execute_group(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engines):
                async def one(i, engine):
                    if i == 1:
                        raise RuntimeError("no luck")
                    await engine.generate([1, 2], sampling_params[i])
                    return {"reward": i}
                playing = (one(i, engine) for i, engine in enumerate(llm_engines))
                return await asyncio.gather(*playing, return_exceptions=True)
        """)
    first, second, third = play(player, seeded(), samples=3)
    assert isinstance(second, FailedEpisode)
    assert "no luck" in second.error
    assert [first.reward, third.reward] == [0.0, 2.0]


def test_a_wrong_signature_is_found_when_the_file_is_loaded(agent):
    with pytest.raises(UserFileError, match="but is called as execute_group"):
        agent("""
            class AgentExecutor(AgentExecutorBase):
                async def execute_group(self, prompt):
                    return []
            """)


# Through hosts and the runner ---------------------------------------------------------------------------------------


def settings_for(tmp_path, code: str) -> EpisodeSettings:
    write_tiny_model(tmp_path / "model")
    (tmp_path / "agent.py").write_text(HEAD + code)
    return EpisodeSettings(
        agent_file=str(tmp_path / "agent.py"),
        tokenizer=str(tmp_path / "model"),
        use_fast=True,
        trust_remote_code=False,
        max_length=100,
        max_steps=None,
        max_model_len=100,
    )


class Played:
    """`Episodes` that play groups, the first of which fail as a whole."""

    plays_groups = True

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)
        self.asked: list[list[int | None]] = []

    async def play_group(self, prompt, sampling_params):
        self.asked.append([params.seed for params in sampling_params])
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def run(episodes, *, n=2):
    runner = EpisodeRunner(episodes=episodes, reward=None, seed=3)
    prompt = Prompt(ordinal=5, text="ask", where="line 6")
    return asyncio.run(runner.play(prompt, n=n, sampling_params=SamplingParams()))


def test_a_group_goes_through_a_host_and_becomes_trajectories(tmp_path):
    """The whole way: a file, a host in this process, the runner."""
    code = BRANCHES.replace('"reward": float(i)', '"agent": "ab"[i % 2], "reward": float(i)')

    async def main():
        engine = ScriptedEngine(lambda ids, params: [10 + params.seed % 7])
        episodes = AgentEpisodes(settings_for(tmp_path, code), engine=engine, hosts=0, step_timeout=60)
        await episodes.start()
        try:
            assert episodes.plays_groups
            runner = EpisodeRunner(episodes=episodes, reward=None, seed=3)
            return await runner.play(Prompt(ordinal=5, text="ask"), n=3, sampling_params=SamplingParams())
        finally:
            await episodes.close()

    group = asyncio.run(main())
    assert [t.key.sample for t in group.trajectories] == [0, 1, 2]
    assert [t.agent for t in group.trajectories] == ["a", "b", "a"]
    assert [t.fork for t in group.trajectories] == [None, Fork(0, 1), Fork(0, 1)]
    assert {agent: [t.key.sample for t in members] for agent, members in group.by_agent.items()} == {
        "a": [0, 2],
        "b": [1],
    }


def test_a_failed_group_is_played_again_whole_with_the_same_seeds(monkeypatch, agent):
    from openrlhf.agents.episodes import EpisodeError
    from openrlhf.rollout import runner

    monkeypatch.setattr(runner, "BACK_OFF_SECONDS", 0.0)
    good = play(agent(DUEL), seeded())
    episodes = Played(EpisodeError("boom", retry=True), [good[0], FailedEpisode(error="alone", agent="player 1")])
    group = run(episodes)
    assert episodes.asked[0] == episodes.asked[1]
    assert [t.outcome for t in group.trajectories] == [Outcome.FINISHED, Outcome.FAILED]
    assert group.trajectories[1].error == "line 6: alone"
    assert group.trajectories[1].agent == "player 1"
    broken = run(Played(EpisodeError("broken", retry=False)))
    assert all(t.failed for t in broken.trajectories)


def test_roles_and_forks_come_back_from_a_checkpoint_and_from_the_token_log(tmp_path, agent):
    from openrlhf.observability.token_log import TokenLog, read_groups, steps
    from openrlhf.rollout.collector import group_from, group_state

    played = play(agent(BRANCHES), seeded(), samples=3)
    named = [dataclasses.replace(one, agent=f"role {i}") for i, one in enumerate(played)]
    group = run(Played(named), n=3)
    parts = (RewardPart("right", 1.0), RewardPart("format", 0.5, 2.0))
    members = [dataclasses.replace(t, reward_parts=parts, greedy_reward=0.25) for t in group.trajectories]
    group = dataclasses.replace(group, trajectories=tuple(members))
    again = group_from(group_state(group), group.prompt)
    log = TokenLog(tmp_path, CharTokenizer(), groups=-1)
    log.write(1, [group], lambda keys: {})
    log.close()
    (logged,) = read_groups(steps(tmp_path)[1])
    for other in (again, logged):
        assert [(t.agent, t.fork) for t in other.trajectories] == [(t.agent, t.fork) for t in group.trajectories]
        assert isinstance(other.trajectories[1].fork, Fork)
        assert [(t.reward_parts, t.greedy_reward) for t in other.trajectories] == [(parts, 0.25)] * 3
        assert isinstance(other.trajectories[1].reward_parts[0], RewardPart)
