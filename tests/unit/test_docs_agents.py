"""The agents of docs/agents.md play, and the episode it shows is the one its first agent plays."""

import asyncio
import dataclasses
import re
from pathlib import Path

import pytest
from chat_model import Speaker, chat_tokenizer
from scripted_engine import CharTokenizer, ScriptedEngine
from vision_models import image, vision_tokenizer

from openrlhf.agents.user_agent import load_agent
from openrlhf.agents.user_calls import AgentError
from openrlhf.types import SamplingParams

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
AGENTS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
TEN_LINES, GUESS, CALCULATOR, ZOOM, THINKER, DRAFTS, JUDGED, FORKS, DUEL, OLDER = AGENTS


class SpeakingEngine(ScriptedEngine):
    """Says these texts in turn, the last one again and again; tokens are characters."""

    def __init__(self, *texts: str) -> None:
        super().__init__(lambda prompt, params: [ord(c) for c in texts[min(len(self.asked), len(texts)) - 1]])

    async def generate(self, token_ids, sampling_params, images=()):
        answer = await super().generate(token_ids, sampling_params)
        return dataclasses.replace(answer, text="".join(map(chr, answer.token_ids)))


@pytest.fixture
def play(tmp_path):
    def played(source: str, *texts: str, prompt="2+3=", label="5", max_steps=None):
        """The episode in which the policy says these texts, and what the engine was asked."""
        file = tmp_path / "agent.py"
        file.write_text(source)
        engine = SpeakingEngine(*texts)
        episode = asyncio.run(
            load_agent(file).play(
                prompt, label, SamplingParams(seed=7), 200, CharTokenizer(), engine, max_steps=max_steps
            )
        )
        return episode, engine

    return played


def as_shown(segment) -> str:
    """Tokens, actions and rewards of turns, under each other."""
    mask = segment.action_mask.tolist()
    ends = [action and not after for action, after in zip(mask, [*mask[1:], False], strict=True)]
    rows = {
        "token": [chr(token).replace(" ", "␣") for token in segment.token_ids.tolist()],
        "action": ["1" if action else " " for action in mask],
        "reward": [f"{r:g}" if end else " " for r, end in zip(segment.turn_rewards.tolist(), ends, strict=True)],
    }
    return "".join(f"{name:9}{' '.join(row)}".rstrip() + "\n" for name, row in rows.items())


def test_the_first_agent_plays_the_episode_that_is_shown(play):
    shown = re.findall(r"^```text\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)[0]
    episode, _ = play(TEN_LINES, "6.", "5.")
    assert as_shown(episode.segments[0]) == shown
    assert (episode.reward, episode.score, episode.truncated) == (1.0, 1.0, False)


def test_it_is_ten_lines():
    lines = [line for line in TEN_LINES.splitlines() if line.strip() and not line.startswith(("#", "from", "class"))]
    assert len(lines) <= 10


def test_it_gives_up_after_three_and_a_limit_of_turns_truncates(play):
    assert play(TEN_LINES, "6.")[0].segments[0].action_mask.sum() == 6
    assert not play(TEN_LINES, "6.")[0].truncated
    assert play(TEN_LINES, "6.", max_steps=2)[0].truncated


def test_feedback_in_the_models_own_template(tmp_path):
    """The policy closes its first answer itself and is cut short in the second; either way the turn is closed once."""
    (tmp_path / "agent.py").write_text(GUESS)
    tokenizer = chat_tokenizer()
    engine = Speaker(tokenizer, "7", "8 or so", "5")
    player = load_agent(tmp_path / "agent.py")
    params = SamplingParams(max_tokens=2)
    prompt = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    episode = asyncio.run(player.play(prompt, "5", params, 500, tokenizer, engine))
    again = "<|im_end|>\n<|im_start|>user\nNo. Try again.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(engine.asked[1][0]) == f"{prompt}7{again}"
    assert episode.text == f"{prompt}7{again}8 {again}5<|im_end|>"
    assert episode.reward == 1.0


def test_a_policy_looks_at_a_part_of_an_image(tmp_path):
    (tmp_path / "agent.py").write_text(ZOOM)
    tokenizer = vision_tokenizer("qwen2_5_vl")
    engine = ScriptedEngine(lambda *_: tokenizer("3" if len(engine.asked) == 1 else "9")["input_ids"])
    around = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt, picture = f"user={around}which?!assistant=", image(1, width=48, height=32)
    player = load_agent(tmp_path / "agent.py")
    episode = asyncio.run(player.play(prompt, "9", SamplingParams(), 500, tokenizer, engine, [picture]))
    inputs = [tokenizer.episode_images.prepare_one(part) for part in (picture, picture.crop((24, 0, 48, 16)))]
    whole = tokenizer.episode_images.expand(f"{prompt}3!user={around} What is it?!assistant=", inputs)
    assert engine.asked[1][0] == whole.token_ids
    assert [shown.digest for _, shown in engine.shown[1]] == [shown.digest for shown in inputs]
    assert episode.reward == 1.0


def test_the_calculator(play):
    """0.1 for a sum, 1 for the answer; the second turn is sampled at the temperature that the first step returned."""
    episode, engine = play(CALCULATOR, "2+3", "5.")
    assert episode.text == "2+3=\nWrite a sum: 2+3\nThat is 5. The answer: 5."
    assert [r for r in episode.segments[0].turn_rewards.tolist() if r] == pytest.approx([0.1, 1.0])
    assert episode.extra_logs == {"terms": 2.0, "right": 1.0}
    assert [params.temperature for _, params in engine.asked] == [1.0, 0.5]


def test_an_executor_keeps_its_own_books(play):
    episode, engine = play(THINKER, "it is five", "5")
    assert episode.text == "2+3=it is five So: 5"
    assert episode.extra_logs == {"thoughts": 10.0}
    assert episode.unmatched_ranges == 0
    assert [params.max_tokens for _, params in engine.asked] == [16, 4]
    assert episode.segments[0].turn_rewards.nonzero().flatten().tolist() == [len(episode.segments[0]) - 1]


def test_the_engines_calls_are_the_episode(play):
    """Three calls that do not go on from each other; the reward stands once."""
    episode, _ = play(DRAFTS, "4", "5", "B")
    assert [int(segment.action_mask.sum()) for segment in episode.segments] == [1, 1, 1]
    assert episode.reward == 1.0
    assert sum(float(segment.turn_rewards.sum()) for segment in episode.segments) == 1.0


def test_a_subclass_adds_to_the_dict(play):
    episode, _ = play(JUDGED, "it is 5")
    assert (episode.reward, episode.extra_logs) == (1.0, {"characters": 7.0})


def test_the_older_shape_plays_the_same_tokens(play):
    old, new = play(OLDER, "6.", "5.")[0], play(TEN_LINES, "6.", "5.")[0]
    assert old.segments[0].token_ids.tolist() == new.segments[0].token_ids.tolist()
    assert old.segments[0].turn_rewards.tolist() == new.segments[0].turn_rewards.tolist()
    assert old.extra_logs == {"tries": 2.0}


def test_a_value_that_cannot_be_used_is_told_with_its_place(play):
    with pytest.raises(AgentError, match=r"agent\.py:9: step's 'rewards' must be one number, got 'yes'"):
        play(TEN_LINES.replace("float(right)", "'yes'"), "5.")


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)", TEXT))
def test_links_lead_somewhere(link):
    assert (Path(__file__).resolve().parents[2] / "docs" / link).exists()


def test_the_readme_shows_the_same_ten_lines():
    assert TEN_LINES in (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def play_group(tmp_path, source: str, *texts: str):
    (tmp_path / "agent.py").write_text(source)
    params = [SamplingParams(seed=seed) for seed in range(4)]
    player = load_agent(tmp_path / "agent.py")
    says = iter(texts)
    engine = SpeakingEngine()
    engine.says = lambda prompt, params: [ord(c) for c in next(says)]
    return asyncio.run(player.play_group("2+3=", "5", params, 200, CharTokenizer(), engine))


def test_forks_of_one_reset_look_for_one_number(tmp_path):
    """All four say 1, 2, 3, …: they find the same number, or none of them does."""
    texts = [str(guess) for guess in (4, 5, 6) for _ in range(4)]
    episodes = play_group(tmp_path, FORKS, *texts)
    assert len({episode.text for episode in episodes}) == 1
    assert len({episode.reward for episode in episodes}) == 1


def test_the_duel_has_two_roles_and_one_winner(tmp_path):
    """Two games at once, each side in turn: 4 beats 3, and 9 beats 8."""
    episodes = play_group(tmp_path, DUEL, "1", "2", "1", "2", "3", "8", "4", "9")
    assert [episode.agent for episode in episodes] == ["player 0", "player 1"] * 2
    assert [episode.reward for episode in episodes] == [0.0, 1.0, 0.0, 1.0]
    assert episodes[0].text == "2+3=1 They said 1. You: 3 They said 4. You: "
