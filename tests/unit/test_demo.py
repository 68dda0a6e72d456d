"""The demos' tasks are fair ones: enough problems, none on both sides, no answer that pays off blindly."""

import asyncio
import dataclasses
import json
import random
import sys
from collections import Counter

import pytest
from scripted_engine import CharTokenizer, ScriptedEngine

from openrlhf.agents.user_agent import load_agent
from openrlhf.cli.demo import PROMPTS, main, rl_flags
from openrlhf.config import parse
from openrlhf.data.images import read_image
from openrlhf.demo import digits, hunt, sorting
from openrlhf.demo.model import make_model, make_tokenizer, write_vision_model
from openrlhf.demo.reward import reward_func
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_tokenizer
from openrlhf.types import SamplingParams

MODULES = [sorting, hunt]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("seed", range(4))
def test_problems_are_many_and_disjoint_and_no_answer_is_common(module, seed):
    task = module.make_task(seed=seed)
    assert len(set(task.train)) == len(task.train) >= 1000
    assert not {p.prompt for p in task.train} & {p.prompt for p in task.held_out}
    for side in (task.train, task.held_out):
        actions = Counter("".join(turn.action for turn in p.worked(random.Random(0))) for p in side)
        assert actions.most_common(1)[0][1] <= 0.1 * len(side)


@pytest.mark.parametrize("seed", range(4))
def test_demo_answers_are_on_one_side_of_the_split_only(seed):
    task = sorting.make_task(seed=seed)
    assert not {p.label for p in task.train} & {p.label for p in task.held_out}


def test_demo_reward_needs_the_right_order_and_an_end():
    queries = ["73914>13479<eos>", "73914>13479", "73914>13497<eos>", "73914>134799"]
    result = reward_func(queries, ["73914>"] * 4, ["13479"] * 4)
    assert result["rewards"] == result["scores"] == [1.0, 0.0, 0.0, 0.0]


class TestHunt:
    PROBLEM = hunt.Hunt("dkbxsph", "5271")

    def play(self, *answers):
        """The hunt, with these answers in turn."""
        engine = ScriptedEngine(lambda prompt, params: [ord(c) for c in answers[len(engine.asked) - 1]])
        player = load_agent(hunt.AGENT_FILE)
        params = SamplingParams(max_tokens=7)
        return asyncio.run(player.play(self.PROBLEM.prompt, self.PROBLEM.label, params, 64, CharTokenizer(), engine))

    def test_right_answers_earn_the_next_clue(self):
        """Places 5, 2, 7, 1 of d k b x s p h."""
        episode = self.play("s<eos>", "k<eos>", "h<eos>", "d<eos>")
        assert episode.text == "dkbxsph5s<eos>2k<eos>7h<eos>1d<eos>"
        assert (episode.reward, episode.score, episode.extra_logs) == (1.0, 1.0, {"found": 4.0})
        assert [r for r in episode.segments[0].turn_rewards.tolist() if r] == [0.25] * 4

    @pytest.mark.parametrize("wrong", ["x<eos>", "k", "k2<eos>", "<eos>"])
    def test_a_wrong_one_ends_it_without_a_clue(self, wrong):
        episode = self.play("s<eos>", wrong)
        assert episode.text == "dkbxsph5s<eos>2" + wrong
        assert (episode.reward, episode.score, episode.extra_logs) == (0.25, 0.0, {"found": 1.0})

    def test_worked_examples_are_games_that_are_won(self):
        problem = hunt.make_task(seed=0, train=1, held_out=1).train[0]
        turns = problem.worked(random.Random(0))
        self.PROBLEM = problem
        episode = self.play(*(f"{turn.action}<eos>" for turn in turns))
        assert episode.score == 1.0
        assert episode.text == problem.prompt + "".join(f"{turn.action}<eos>{turn.feedback}" for turn in turns)


class TestDigits:
    @pytest.fixture(scope="class")
    def task(self):
        return digits.make_task(seed=0)

    def test_images_are_many_and_on_one_side_of_the_split(self, task):
        shown = [{problem.image for problem in side} for side in (task.train, task.held_out)]
        assert len(task.train) + len(task.held_out) == 1797
        assert len(shown[0] & shown[1]) <= 2  # the data set itself has equal images
        labels = Counter(problem.label for problem in task.held_out)
        assert len(labels) == 10
        assert labels.most_common(1)[0][1] <= 0.15 * len(task.held_out)

    def test_the_warm_up_tells_nothing_about_the_images(self, task):
        answers = Counter(task.train[0].worked(random.Random(seed))[0].action for seed in range(200))
        assert len(answers) == 10

    def test_records_name_their_images(self, task, tmp_path):
        dataclasses.replace(task, train=task.train[:2], held_out=task.held_out[:1]).write(tmp_path)
        records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
        assert [record["images"] for record in records] == ["train/0000.png", "train/0001.png"]
        assert (tmp_path / "train" / "0001.png").read_bytes() == task.train[1].image
        assert records[0]["input"] == "<image>="

    def test_a_digit_is_read_as_four_features(self, task, tmp_path):
        write_vision_model(tmp_path, seed=0, characters=task.characters)
        tokenizer = load_tokenizer(tmp_path)
        processor = ImageProcessor.load(tmp_path, tokenizer)
        image = processor.prepare(read_image(task.train[0].image, allow_urls=False))
        assert image.num_features == len(image) == 4
        assert image.tensors["pixel_values"].shape == (16, 12)  # patches of 2 × 2 pixels in 3 colours

    def test_a_machine_without_scikit_learn_is_told_what_to_install(self, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        with pytest.raises(SystemExit):
            main(["--images"])
        assert "which is not installed: pip install -e '.[demo-images]'" in capsys.readouterr().err


@pytest.mark.parametrize("module", MODULES)
def test_the_tokenizer_is_one_token_per_character_and_round_trips(module):
    task = module.make_task(seed=0, train=1, held_out=1)
    tokenizer = make_tokenizer(task.characters)
    ids = tokenizer(task.train[0].prompt, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(task.train[0].prompt)
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode([*ids, tokenizer.eos_token_id]) == f"{task.train[0].prompt}<eos>"


@pytest.mark.parametrize("module", MODULES)
def test_the_model_has_one_to_three_million_parameters(module):
    characters = module.make_task(seed=0, train=1, held_out=1).characters
    assert 1e6 <= make_model(make_tokenizer(characters), seed=0).num_parameters() <= 3e6


@pytest.mark.parametrize("module", [*MODULES, digits])
def test_demo_flags_are_a_users_flags(module, tmp_path):
    task = module.make_task(seed=0)
    flags = rl_flags(task, tmp_path, seed=0, steps=task.max_steps(PROMPTS))
    config = parse("train_ppo_ray", [part for name, value in flags.items() for part in (f"--{name}", str(value))])
    assert config.data.max_samples <= len(task.train) * task.epochs
    assert 1 <= task.steps <= task.max_steps(PROMPTS)
