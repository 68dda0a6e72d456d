"""Runs whose rewards come from a reward model in the training process."""

import pytest
import torch
from small_sections import loading
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.checkpoint.export import export_value_model
from openrlhf.models.loading import load_tokenizer, load_value_model
from openrlhf.models.value import Normalisation
from openrlhf.observability.jsonl import read_json_lines


@pytest.fixture(scope="module")
def reward_model(inputs, tmp_path_factory):
    """A random head on the body of the policy, with mean 0.25 and std 0.5 stored."""
    model = load_value_model(inputs.model, loading(seed=1))
    folder = tmp_path_factory.mktemp("reward") / "model"
    return export_value_model(model, load_tokenizer(inputs.model), folder, statistics=Normalisation(0.25, 0.5))


@pytest.fixture
def run(cli, reward_model):
    def start(*words, model=reward_model, **overrides):
        return cli(*words, reward__remote_url="", reward__model_name_or_path=model, **overrides)

    return start


def scores_of(folder, texts):
    """By transformers' own classes, a text at a time: the head at the last token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]]) for text in texts]
        return [classifier.score(classifier.model(row).last_hidden_state[0, -1]).item() for row in ids]


@pytest.mark.parametrize("normalise", [False, True])
def test_two_rounds_with_the_scores_that_transformers_gives(run, reward_model, normalise):
    ran = run(*["--reward.normalize_enable"] * normalise)
    assert ran.rc == 0, ran.err
    assert "Traceback" not in ran.err
    rollouts = list(read_json_lines(ran.run_dir / "rollouts.jsonl"))
    assert len(rollouts) == 16, "two rounds of 4 prompts with 2 samples"
    expected = scores_of(reward_model, [r["prompt"] + r["response"] for r in rollouts])
    if normalise:
        expected = [(score - 0.25) / 0.5 for score in expected]
    assert [r["reward"] for r in rollouts] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert len(set(expected)) > 8
    assert (ran.run_dir / "model" / "config.json").is_file()


def test_a_file_and_two_models_together(cli, reward_model, tmp_path):
    """Weights 1, 2 and 3, the file's reward 5: 5 + (2 + 3) times what the model gives, which is there twice."""
    path = tmp_path / "five.py"
    path.write_text("def reward_func(queries): return {'rewards': [5.0] * len(queries), 'scores': 1}")
    ran = cli(
        *["--reward.weights", "1", "2", "3"],
        reward__remote_url=path,
        reward__model_name_or_path=f"{reward_model},{reward_model}",
    )
    assert ran.rc == 0, ran.err
    rollouts = list(read_json_lines(ran.run_dir / "rollouts.jsonl"))
    own = scores_of(reward_model, [r["prompt"] + r["response"] for r in rollouts])
    assert [r["reward"] for r in rollouts] == pytest.approx([5 + 5 * score for score in own], rel=1e-4)
    assert {r["score"] for r in rollouts} == {1.0}
    step = ran.metrics[0]
    assert step["reward_five"] == 5.0
    assert step["reward_model"] == step["reward_model_2"]


def refused(ran, *parts):
    assert ran.rc == 1, ran.err
    assert len(ran.errors) == 1, ran.err
    for part in parts:
        assert part in ran.errors[0]
    assert "Traceback" not in ran.err


def test_a_folder_that_is_not_there(run):
    refused(run(model="./nope"), "--reward.model_name_or_path ./nope: no such folder")


def test_a_language_model_cannot_judge(run, inputs):
    refused(run(model=inputs.model), "--reward.model_name_or_path", "no score.weight", "train_rm")


def test_a_model_without_statistics_cannot_be_normalised(run, inputs, tmp_path):
    model = load_value_model(inputs.model, loading())
    folder = export_value_model(model, load_tokenizer(inputs.model), tmp_path / "reward")
    ran = run("--reward.normalize_enable", model=folder)
    refused(ran, "--reward.model_name_or_path", "--reward.normalize_enable", "mean there is missing")
