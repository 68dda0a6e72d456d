"""Process rewards: where steps end, what a model gives them, and what becomes of it in advantages."""

import asyncio
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
)

from openrlhf.algorithms.advantages import Turns, get_estimator
from openrlhf.config import parse
from openrlhf.learners.advantages import AdvantageSettings, give_credit, training_samples
from openrlhf.models.loading import ModelLoadError
from openrlhf.rewards.base import Reward, RewardError, RewardRequest
from openrlhf.rewards.combined import CombinedReward
from openrlhf.rewards.steps import StepReader, StepRewards, step_ends
from openrlhf.runs.reward_sources import reward_model_here
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, TrainingBatch, Trajectory

WORDS = ["<unk>", "<eos>", "\n", "\n\n", ".\n", "\n\n\n", "a", "b", "c", " ", "é", "S", "T"]
IDS = {word: i for i, word in enumerate(WORDS)}


def make_tokenizer(words=WORDS):
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")


def ends_of(*words, prompt=1, mask=None, separator="\n\n"):
    """The ends of the steps of these tokens, the first `prompt` of which are not the policy's."""
    ids = torch.tensor([IDS[word] for word in words])
    mask = torch.arange(len(ids)) >= prompt if mask is None else torch.tensor(mask, dtype=torch.bool)
    return step_ends(ids, mask, make_tokenizer(), separator=separator)


class TestEndsOfSteps:
    def test_one_token_is_the_separator(self):
        assert ends_of("a", "b", "\n\n", "c", "a") == (2, 4)

    def test_a_separator_spans_tokens(self):
        assert ends_of("a", "b", "\n", "\n", "c", ".\n", "\n", "a") == (3, 6, 7)

    def test_one_line_end_is_no_separator(self):
        assert ends_of("a", "b", "\n", "c") == (3,)

    def test_a_separator_is_not_finished_by_the_next_word(self):
        """Of three line ends in two tokens, two make the separator in the first: the third is blank, and its own."""
        assert ends_of("a", "b", "\n\n", "\n", "c") == (2, 4)
        assert ends_of("a", "b", "\n\n\n", "c") == (2, 3)

    def test_the_prompt_is_not_read(self):
        """A separator that begins in the prompt, or stands in it, ends no step of the policy's."""
        assert ends_of("a", "\n\n", "b", "\n", "\n", "c", prompt=4) == (5,)

    def test_blank_steps_belong_to_the_step_before(self):
        assert ends_of("a", "b", "\n\n", "\n\n", "c", "\n\n", "<eos>") == (3, 6)

    def test_a_blank_beginning_belongs_to_the_first_step(self):
        assert ends_of("a", "\n\n", "\n\n", "b", "\n\n", "c") == (4, 5)

    def test_an_answer_without_text_is_one_step(self):
        assert ends_of("a", "<eos>") == (1,)
        assert ends_of("a", "\n\n", "<eos>") == (2,)

    def test_no_tokens_of_the_policy_no_steps(self):
        assert ends_of("a", "b", prompt=2) == ()

    def test_turns_end_steps(self):
        """The second turn begins after what the environment said, and a separator does not span what it said."""
        assert ends_of("a", "b", "\n", "S", "\n", "c", "\n\n", "a", mask=[0, 1, 1, 0, 1, 1, 1, 1]) == (2, 6, 7)

    def test_another_separator(self):
        assert ends_of("a", "b", "S", "T", "c", "S", "a", separator="ST") == (3, 6)

    def test_long_steps(self):
        """Steps of 1 to 70 letters: each end is the separator's token, however the search halves."""
        words, wanted = ["a"], []
        for length in range(1, 71):
            words += ["b"] * length + ["\n", "\n"]
            wanted.append(len(words) - 1)
        assert ends_of(*words) == tuple(wanted)

    def test_characters_of_several_tokens(self):
        """A byte-level tokenizer: é is two tokens, of which the first alone is no text."""
        from tokenizers.decoders import ByteLevel

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        inner = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), ByteLevel()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
        ids = torch.tensor(tokenizer("é\n\né→é")["input_ids"])
        mask = torch.ones(len(ids), dtype=torch.bool)
        assert step_ends(ids, mask, tokenizer, separator="\n\n") == (3, len(ids) - 1)
        assert step_ends(ids, mask, tokenizer, separator="→") == (8, len(ids) - 1)


class TestRewardsOfSteps:
    def reader(self, **options):
        return StepReader(tokenizer=make_tokenizer(), separator="\n\n", **options)

    def test_probabilities(self):
        """σ(0) = 1/2, σ(ln 3) = 3/4, σ(−ln 3) = 1/4."""
        values = [0.0, math.log(3), -math.log(3), math.log(3)]
        assert self.reader(total="sum").rewards(values) == pytest.approx([0.5, 0.75, 0.25, 0.75])
        assert self.reader(total="mean").rewards(values) == pytest.approx([0.125, 0.1875, 0.0625, 0.1875])
        assert self.reader(total="min").rewards(values) == pytest.approx([0, 0, 0.25, 0])
        assert self.reader(total="last").rewards(values) == pytest.approx([0, 0, 0, 0.75])

    def test_logits(self):
        assert self.reader(total="sum", logits=True).rewards([2.0, -1000.0]) == [2.0, -1000.0]
        assert self.reader(total="min", logits=True).rewards([2.0, -3.0, -3.0]) == [0.0, -3.0, 0.0]

    def test_certain_steps(self):
        assert self.reader(total="sum").rewards([1000.0, -1000.0]) == [1.0, 0.0]

    def test_every_token_is_a_step(self):
        reader = StepReader(tokenizer=make_tokenizer(), separator=None)
        assert reader.ends(torch.arange(5), torch.tensor([0, 1, 0, 1, 1], dtype=torch.bool)) == (1, 3, 4)


SHAPE = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
}
PROMPTS = [
    [["a", "b", "\n\n", "c", "<eos>"], ["a", "c", "c", "\n", "\n", "b", "\n\n", "a"], ["a", "b", "<eos>"]],
    [["c", "c", "c", "\n\n", "b"]],
]


@pytest.fixture(scope="module", params=["two labels", "one label", "sequence classifier"])
def folder(request, tmp_path_factory):
    """A reward model of each kind, its weights random, its bias not 0."""
    path = tmp_path_factory.mktemp("prm")
    torch.manual_seed(0)
    if request.param == "sequence classifier":
        model = Qwen2ForSequenceClassification(Qwen2Config(**SHAPE, num_labels=1, pad_token_id=1))
    else:
        model = Qwen2ForTokenClassification(Qwen2Config(**SHAPE, num_labels=1 + (request.param == "two labels")))
        torch.nn.init.normal_(model.score.bias)
    model.eval().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path, model


def request_of(words, name="record 1"):
    ids = tuple(torch.tensor([IDS[word] for word in sample]) for sample in words)
    return RewardRequest(
        queries=tuple("".join(sample) for sample in words),
        prompts=tuple(sample[0] for sample in words),
        labels=("",) * len(words),
        name=name,
        token_ids=ids,
        action_masks=tuple(torch.arange(len(one)) >= 1 for one in ids),
    )


def source_of(path, *flags, tokenizer=None, steps="separator"):
    words = f"--reward.model_name_or_path {path} --ds.param_dtype fp32 --actor.model_name_or_path {path}".split()
    config = parse("train_ppo_ray", [*words, "--reward.steps", steps, *flags])
    return reward_model_here(config, tokenizer or make_tokenizer(), torch.device("cpu"))(str(path), 0)


def judge(source, *requests):
    async def run():
        await source.start()
        return await asyncio.gather(*(source.score(request) for request in requests))

    return asyncio.run(run())


@torch.no_grad()
def plain(model, words):
    """Reference: one sequence, one forward of transformers, the log-odds of every token."""
    ids = torch.tensor([[IDS[word] for word in words]])
    if isinstance(model, Qwen2ForSequenceClassification):
        return model.score(model.model(ids).last_hidden_state)[0, :, 0].tolist()
    logits = model(ids).logits[0]
    return (
        logits[:, 0] if logits.shape[1] == 1 else logits.log_softmax(-1)[:, 1] - logits.log_softmax(-1)[:, 0]
    ).tolist()


class TestModels:
    @pytest.mark.parametrize("budget", ["1", "9", "1000"])
    def test_judge_steps_as_transformers_does_however_they_are_packed(self, folder, budget):
        path, model = folder
        source = source_of(
            path, "--reward.step_total", "sum", "--reward.step_logits", "--train.max_tokens_per_gpu", budget,
            "--train.dynamic_batch_enable",
        )  # fmt: skip
        judged = judge(source, *map(request_of, PROMPTS))
        for samples, rewards in zip(PROMPTS, judged, strict=True):
            for words, reward in zip(samples, rewards, strict=True):
                values, ends = plain(model, words), ends_of(*words)
                assert reward.steps.ends == ends
                assert reward.steps.rewards == pytest.approx([values[end] for end in ends], abs=1e-5)
                assert reward.reward == pytest.approx(sum(reward.steps.rewards))
                assert reward.extra_logs["steps"] == len(ends)

    def test_every_token_and_the_probability(self, folder):
        path, model = folder
        (rewards,) = judge(source_of(path, "--reward.step_total", "sum", steps="token"), request_of(PROMPTS[0]))
        for words, reward in zip(PROMPTS[0], rewards, strict=True):
            wanted = [1 / (1 + math.exp(-value)) for value in plain(model, words)[1:]]
            assert reward.steps.ends == tuple(range(1, len(words)))
            assert reward.steps.rewards == pytest.approx(wanted, abs=1e-5)

    def test_a_separator_of_the_command_line(self, folder):
        path, _ = folder
        (rewards,) = judge(source_of(path, "--reward.step_separator", r"c\n\n"), request_of(PROMPTS[0]))
        assert [reward.steps.ends for reward in rewards] == [(4,), (4, 7), (2,)]

    def test_another_vocabulary_is_refused(self, folder):
        source = source_of(folder[0], tokenizer=make_tokenizer([*WORDS[:-1], "X"]))
        with pytest.raises(RewardError, match=r"--reward\.steps judges the policy's own tokens"):
            judge(source, request_of(PROMPTS[0]))

    def test_steps_that_do_not_fit_are_refused(self, folder):
        source = source_of(folder[0], "--data.max_len", "3", "--rollout.max_new_tokens", "2")
        with pytest.raises(RewardError, match=r"record 1.*--data\.max_len"):
            judge(source, request_of(PROMPTS[0]))


def test_a_model_of_three_labels_is_refused(tmp_path):
    Qwen2ForTokenClassification(Qwen2Config(**SHAPE, num_labels=3)).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"num_labels 3.*num_labels 1 or 2"):
        source_of(tmp_path)


def test_several_sources_add_up_on_the_steps():
    """2 · (0.5, 0.25) from the model, and 3 · 1 of a function at the last step."""

    class Fixed:
        def __init__(self, reward):
            self.reward = reward

        async def start(self): ...

        async def score(self, request):
            return [self.reward]

        async def close(self): ...

    steps = Fixed(Reward(reward=0.75, steps=StepRewards((2, 4), (0.5, 0.25))))
    both = CombinedReward({"prm": steps, "right": Fixed(Reward(reward=1.0))}, [2.0, 3.0])
    (judged,) = asyncio.run(both.score(request_of(PROMPTS[1])))
    assert judged.steps == StepRewards((2, 4), (1.0, 3.5))
    assert judged.reward == 4.5


def episode(sample, ends, rewards, *, tokens=5):
    """A prompt token and an answer of one turn that was judged step by step."""
    segment = Segment(
        token_ids=torch.arange(tokens),
        action_mask=torch.arange(tokens) >= 1,
        rollout_logprobs=torch.zeros(tokens),
        versions=torch.zeros(tokens, dtype=torch.int32),
        turn_rewards=torch.zeros(tokens),
        turn_ends=torch.arange(tokens) == tokens - 1,
    )
    whole = Trajectory(key=SampleKey(0, sample), segments=(segment,), outcome=Outcome.FINISHED)
    return whole.with_reward(sum(rewards), score=None, extra_logs={}, steps=StepRewards(ends, rewards))


class TestAdvantages:
    def advantages(self, estimator, *members, turns=Turns.OUTCOME):
        settings = AdvantageSettings(estimator=get_estimator(estimator), turns=turns)
        group = Group(prompt=Prompt(ordinal=0, text="a", label=""), trajectories=members)
        batch = TrainingBatch(samples=training_samples([group], settings).samples)
        if get_estimator(estimator).needs_critic:
            batch.values_A = torch.zeros(batch.num_actions)
        found = give_credit(batch, settings).advantages_A
        return [own.tolist() for own in found.split([member.num_actions for member in members])]

    def test_steps_are_turns(self):
        (segment,) = episode(0, (2, 4), (0.5, 0.25)).segments
        assert segment.turn_rewards.tolist() == [0, 0, 0.5, 0, 0.25]
        assert segment.turn_ends_A.tolist() == [False, True, False, True]

    @pytest.mark.parametrize("estimator", ["reinforce", "gae"])
    def test_a_reward_counts_for_its_step_and_those_before(self, estimator):
        assert self.advantages(estimator, episode(0, (2, 4), (0.5, 0.25))) == [[0.75, 0.75, 0.25, 0.25]]

    @pytest.mark.parametrize("estimator", ["reinforce", "gae"])
    def test_of_the_minimum_steps_after_the_worst_get_nothing(self, estimator):
        """Rewards as `min` places them: what PURE credits."""
        assert self.advantages(estimator, episode(0, (1, 2, 4), (0.0, 0.25, 0.0))) == [[0.25, 0.25, 0.0, 0.0]]

    def test_groups_compare_totals(self):
        """Totals 0.75 and 0.25: each less the other."""
        two = episode(0, (2, 4), (0.5, 0.25)), episode(1, (4,), (0.25,))
        assert self.advantages("rloo", *two) == [[0.5] * 4, [-0.5] * 4]

    def test_groups_compare_steps_where_asked(self):
        """GRPO's process supervision without the spread: of the steps 1, 0 and 0.5 the mean is 0.5, so that they count
        0.5, −0.5 and 0; a token has the sum of its step and those after."""
        two = episode(0, (2, 4), (1.0, 0.0)), episode(1, (4,), (0.5,))
        assert self.advantages("dr_grpo", *two, turns=Turns.STEP) == [[0.0, 0.0, -0.5, -0.5], [0.0] * 4]
