"""Records refuse what does not fit, where it arises."""

import copy
import dataclasses
import itertools
import pickle

import numpy as np
import pytest
import torch

from openrlhf.types import (
    UNTOLD,
    FinishReason,
    Generation,
    Group,
    Outcome,
    PackedTokens,
    Prompt,
    SampleKey,
    SamplingParams,
    Segment,
    Supports,
    TrainingBatch,
    TrainingSample,
    Trajectory,
)


def segment(tokens: int = 5, prompt: int = 2, *, logprobs: bool = True) -> Segment:
    mask = torch.arange(tokens) >= prompt
    return Segment(
        token_ids=torch.arange(tokens),
        action_mask=mask,
        rollout_logprobs=torch.where(mask, -torch.arange(tokens).float(), 0.0) if logprobs else None,
        versions=torch.where(mask, 1, -1).int(),
        turn_rewards=torch.zeros(tokens),
    )


def trajectory(prompt: int = 0, sample: int = 0) -> Trajectory:
    return Trajectory(key=SampleKey(prompt, sample), segments=(segment(),), outcome=Outcome.FINISHED)


@pytest.mark.parametrize("logprobs", [True, False])
def test_a_segment_crosses_processes_as_it_is(logprobs):
    """And what arrives can be written to, as any tensor."""
    sent = segment(logprobs=logprobs)
    arrived = pickle.loads(pickle.dumps(sent))
    for name in ("token_ids", "action_mask", "versions", "turn_rewards", "rollout_logprobs"):
        before, after = getattr(sent, name), getattr(arrived, name)
        assert (before is after is None) or (before.dtype == after.dtype and torch.equal(before, after))
    arrived.turn_rewards[-1] = 1.0
    assert sent.turn_rewards[-1] == 0.0


def test_routes_cross_processes_and_are_packed_where_their_tokens_are():
    """Three sequences of 6 tokens: the engine told the experts of 4 tokens, of none, and of 5."""
    told = [torch.arange(4 * 2 * 2, dtype=torch.uint8).view(4, 2, 2), None, torch.full((5, 2, 2), 200).to(torch.uint8)]
    sent = [dataclasses.replace(segment(6), routes=routes) for routes in told]
    arrived = [pickle.loads(pickle.dumps(one)) for one in sent]
    packed = PackedTokens.from_segments(arrived)
    assert packed.routes_TLK.dtype == torch.int16
    assert packed.routes_TLK[:4].tolist() == told[0].tolist()
    known = (packed.routes_TLK >= 0).all(dim=(1, 2))
    assert known.tolist() == [True] * 4 + [False] * 2 + [False] * 6 + [True] * 5 + [False]
    first, second, third = packed.split()
    assert first.routes_TLK.tolist() == packed.routes_TLK[:6].tolist()
    assert (third.routes_TLK[:5] == 200).all()
    assert (second.routes_TLK == -1).all()
    assert packed.without_routes().routes_TLK is None
    assert PackedTokens.from_segments([segment()]).routes_TLK is None
    with pytest.raises(ValueError, match="at most 6 tokens"):
        dataclasses.replace(segment(6), routes=torch.zeros(7, 2, 2, dtype=torch.uint8))


TOLD = [[4, 9], [], None, [1, 4, 7], [2]]


def test_supports_are_cut_joined_and_sent_as_they_were_told():
    supports = Supports.of(TOLD)
    assert supports.sizes_A.tolist() == [2, 0, UNTOLD, 3, 1]
    assert supports.token_ids.tolist() == [4, 9, 1, 4, 7, 2]
    assert pickle.loads(pickle.dumps(supports)).tolist() == supports.tolist() == TOLD
    for start, stop in itertools.combinations_with_replacement(range(6), 2):
        assert supports[start:stop].tolist() == TOLD[start:stop]
    assert supports[3:].tolist() == TOLD[3:]
    assert supports.at(torch.tensor([3, 2, 0, 3])).tolist() == [TOLD[3], None, TOLD[0], TOLD[3]]
    assert supports.at(torch.tensor([], dtype=torch.int64)).tolist() == []
    assert Supports.joined([(supports[:2], 2), (None, 2), (supports[3:], 2)]).tolist() == [*TOLD[:2], [], [], *TOLD[3:]]
    assert Supports.joined([(None, 2), (None, 1)]) is Supports.joined([]) is None
    with pytest.raises(ValueError, match="ids for supports of"):
        Supports(torch.tensor([2, UNTOLD]), torch.tensor([1]))


def test_supports_are_packed_with_their_actions():
    """A stream without any has none; a sequence without any beside others was sampled from whole distributions."""
    first = segment(6)
    actions = first.num_actions
    told = [[token] for token in first.token_ids[first.action_mask].tolist()]
    sent = [dataclasses.replace(first, supports=Supports.of(told)), segment(6)]
    sent.append(dataclasses.replace(sent[0], supports=Supports.of([None] * actions)))
    packed = PackedTokens.from_segments([pickle.loads(pickle.dumps(one)) for one in sent])
    assert packed.supports.tolist() == [*told, *[[]] * actions, *[None] * actions]
    apart = [tokens.supports.tolist() for tokens in packed.split()]
    assert apart == [told, [[]] * actions, [None] * actions]
    assert PackedTokens.from_segments([segment(6)]).supports is None
    with pytest.raises(ValueError, match=f"1 supports for {actions} action tokens"):
        dataclasses.replace(first, supports=Supports.of([[1]]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 1}, True),
        ({"min_p": 0.1}, True),
        ({}, False),
        ({"top_p": 0.9, "temperature": 0.0}, False),
        ({"top_p": 0.9, "supports": 0}, False),
    ],
)
def test_supports_are_wanted_where_something_cuts_the_distribution(given, wanted):
    assert SamplingParams(**{"supports": 8, **given}).wants_supports is wanted


def test_prompt_must_not_be_empty():
    with pytest.raises(ValueError, match="prompt 3 is empty"):
        Prompt(ordinal=3, text="")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": None},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"presence_penalty": 3},
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"min_tokens": -1},
        {"stop": [""]},
        {"stop": [5]},
        {"stop_token_ids": ["a"]},
        {"detokenize": False, "stop": "x"},
        {"logprobs": 5},
        {"seed": "one"},
        {"n": 2},
        {"prompt_logprobs": 0},
        {"bad_words": ["no"]},
        {"logit_bias": {1: 2.0}},
    ],
)
def test_sampling_params_refuse_what_cannot_be_sampled(wrong):
    """When they are made, and, assigned later, when they are copied: every request is made with a copy."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
    params = SamplingParams()
    for name, value in wrong.items():
        setattr(params, name, value)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        params.copy()


def test_sampling_params_take_what_agents_write():
    params = copy.deepcopy(SamplingParams(n=1, bad_words=[], top_k=-1, logit_bias=None, stop=None, logprobs=None))
    assert not params.wants_logprobs
    params.stop = "</tool>"
    params.max_tokens = np.int64(7)
    params.logprobs = 0
    assert params.copy().stop == ["</tool>"]
    assert params.copy().wants_logprobs
    with pytest.raises(AttributeError, match="max_token"):
        params.max_token = 5


def test_a_copy_of_sampling_params_is_its_own():
    params = SamplingParams(max_tokens=5, stop="END")
    changed = params.copy(max_tokens=7)
    changed.temperature = 0.1
    assert (params.max_tokens, params.temperature, params.stop) == (5, 1.0, ["END"])


def test_generation_columns_must_agree():
    with pytest.raises(ValueError, match="equal lengths"):
        Generation(token_ids=[1, 2], logprobs=[-0.1], versions=[0, 0], finish_reason="stop")


def test_a_generation_reads_like_a_request_output_of_vllm():
    said = Generation(
        token_ids=[7, 8],
        logprobs=[-0.5, -0.25],
        versions=[0, 0],
        finish_reason=FinishReason.STOP,
        stop_reason="!",
        text="hi",
    )
    (output,) = said.outputs
    assert (output.index, output.token_ids, output.text, output.finish_reason) == (0, [7, 8], "hi", "stop")
    assert [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)] == [
        -0.5,
        -0.25,
    ]
    assert (output.cumulative_logprob, output.stop_reason) == (-0.75, "!")
    # A loop over `generation.outputs[0].logprobs[i]` must not build the list anew for every i.
    assert said.outputs[0].logprobs is output.logprobs
    assert pickle.loads(pickle.dumps(said)) == said

    unscored = Generation(token_ids=[7], logprobs=None, versions=[0], finish_reason=FinishReason.LENGTH)
    assert unscored.outputs[0].logprobs is unscored.outputs[0].cumulative_logprob is None


def test_segment_columns_must_agree_and_cannot_begin_with_an_action():
    good = segment()
    with pytest.raises(ValueError, match="versions has shape"):
        Segment(
            token_ids=good.token_ids,
            action_mask=good.action_mask,
            rollout_logprobs=None,
            versions=good.versions[:-1],
            turn_rewards=good.turn_rewards,
        )
    with pytest.raises(ValueError, match="cannot be an action"):
        segment(prompt=0)


def test_a_reward_lands_on_the_last_action_token_and_score_falls_back_to_it():
    judged = trajectory().with_reward(0.5, score=None, extra_logs={})
    assert judged.segments[0].turn_rewards.tolist() == [0, 0, 0, 0, 0.5]
    assert (judged.reward, judged.score) == (0.5, 0.5)


def test_failures_say_why_and_stay_out_of_scored():
    with pytest.raises(ValueError, match="does not say why"):
        Trajectory(key=SampleKey(0, 0), segments=(), outcome=Outcome.FAILED)
    good = trajectory(sample=0).with_reward(1.0, score=None, extra_logs={})
    group = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(good, trajectory(sample=1).as_failed("boom")))
    assert group.scored == (good,)


def test_a_group_takes_only_its_own_prompts_trajectories():
    with pytest.raises(ValueError, match="is not of prompt 1"):
        Group(prompt=Prompt(ordinal=1, text="x"), trajectories=(trajectory(prompt=0),))


def test_packing_lays_sequences_end_to_end():
    """Sequences of 5 (3 actions) and 3 (1 action) tokens: actions at stream positions 2,3,4 and 7."""
    tokens = PackedTokens.from_segments([segment(5, 2), segment(3, 2)])
    assert tokens.token_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert tokens.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert tokens.cu_seqlens.tolist() == [0, 5, 8]
    assert tokens.action_positions.tolist() == [2, 3, 4, 7]
    assert tokens.action_sequences().tolist() == [0, 0, 0, 1]
    assert (tokens.max_seqlen, tokens.num_sequences, tokens.num_actions) == (5, 2, 4)
    first, second = tokens.split()
    assert first.action_positions.tolist() == [2, 3, 4]
    assert (second.token_ids.tolist(), second.action_positions.tolist()) == ([0, 1, 2], [2])


def test_a_micro_batch_carries_the_columns_of_its_samples_in_its_own_order():
    samples = [
        TrainingSample(key=SampleKey(0, i), segment=segment(tokens, 2), rewards_A=torch.zeros(tokens - 2))
        for i, tokens in enumerate([4, 3, 5])
    ]
    batch = TrainingBatch(samples=samples)
    assert batch.action_offsets == [0, 2, 3, 6]
    batch.advantages_A = torch.arange(6.0)
    packed = batch.pack([2, 0])
    assert packed.advantages_A.tolist() == [3, 4, 5, 0, 1]
    assert packed.rollout_logprobs_A.tolist() == [-2, -3, -4, -2, -3]
    assert packed.rows.tolist() == [3, 4, 5, 0, 1]
    assert packed.old_logprobs_A is None


def test_rollout_logprobs_are_nan_where_a_sample_has_none():
    """Two samples of three actions each, the first without log-probs."""
    without, with_ = (
        TrainingSample(key=SampleKey(0, i), segment=part, rewards_A=torch.zeros(part.num_actions))
        for i, part in enumerate((segment(logprobs=False), segment(logprobs=True)))
    )
    known_A = with_.segment.rollout_logprobs[with_.segment.action_mask]
    batch = TrainingBatch(samples=[without, with_])
    assert batch.rollout_logprobs_A[batch.actions_of(0)].isnan().all()
    assert torch.equal(batch.rollout_logprobs_A[batch.actions_of(1)], known_A)
    assert torch.equal(batch.pack([1]).rollout_logprobs_A, known_A)
    assert TrainingBatch(samples=[without]).rollout_logprobs_A is None
