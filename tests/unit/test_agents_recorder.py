"""One writer: the columns always agree, and nothing else can change them."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.agents.base import Episode
from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.results import describe_episode
from openrlhf.types import FinishReason, Generation, ImageInput, PlacedImage, Supports
from openrlhf.utils.randomness import derive_seed


def said(ids: list[int], *, version: int = 0, logprobs: bool = True) -> Generation:
    return Generation(
        token_ids=ids,
        logprobs=[-float(i) for i in ids] if logprobs else None,
        versions=[version] * len(ids),
        finish_reason=FinishReason.STOP,
    )


def test_two_turns_are_recorded_as_they_happened():
    recorder = TokenRecorder([10, 11])
    recorder.append_action(said([1, 2], version=7))
    recorder.reward_turn(0.5)
    recorder.append_observation([12])
    recorder.append_action(said([3], version=8))
    recorder.reward_turn(1.0)
    segment = recorder.segment()
    assert segment.token_ids.tolist() == [10, 11, 1, 2, 12, 3]
    assert segment.action_mask.tolist() == [False, False, True, True, False, True]
    assert segment.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, -3]
    assert segment.versions.tolist() == [-1, -1, 7, 7, -1, 8]
    assert segment.turn_rewards.tolist() == [0, 0, 0, 0.5, 0, 1.0]
    assert segment.turn_ends.tolist() == [False, False, False, True, False, True]
    assert recorder.turns == 2


def routed(read: int, mark: int) -> np.ndarray:
    """Two layers, one expert each: the first layer's is `mark`, the second layer's is the token's place."""
    return np.stack([np.full(read, mark), np.arange(read)], axis=1)[:, :, None].astype(np.uint8)


def test_routes_are_those_of_the_last_reading():
    """The second turn reads the first one again; feedback after it, and the last token, have no experts."""
    recorder = TokenRecorder([10, 11])
    recorder.append_action(dataclasses.replace(said([1, 2]), routes=routed(3, mark=7)))
    recorder.append_observation([12])
    recorder.append_action(dataclasses.replace(said([3]), routes=routed(5, mark=8)))
    assert recorder.segment().routes[:, :, 0].tolist() == [[8, i] for i in range(5)]
    recorder.append_action(said([4]))  # by an engine that does not tell
    recorder.append_observation([13])
    assert recorder.segment().routes.shape == (5, 2, 1)
    with pytest.raises(ValueError, match="routes of 3 tokens, and has read 8"):
        recorder.append_action(dataclasses.replace(said([5]), routes=routed(3, mark=9)))


def test_supports_are_those_of_the_action_tokens():
    """The second turn's distributions were whole; feedback has none."""
    recorder = TokenRecorder([10, 11])
    recorder.append_action(dataclasses.replace(said([1, 2]), supports=Supports.of([[1, 5], None])))
    recorder.append_observation([12])
    recorder.append_action(said([3]))
    recorder.append_action(dataclasses.replace(said([4]), supports=Supports.of([[4]])))
    assert recorder.segment().supports.tolist() == [[1, 5], None, [], [4]]
    with pytest.raises(ValueError, match="'supports': 1"):
        dataclasses.replace(said([1, 2]), supports=Supports.of([[1]]))


def test_turns_side_by_side_are_told_apart():
    """An environment that says nothing puts no token between two actions; what is returned of them says so too."""
    recorder = TokenRecorder([10])
    for ids in ([1, 2], [3], [4, 5]):
        recorder.append_action(said(ids))
    recorder.append_observation([12])
    recorder.append_action(said([6]))
    segment = recorder.segment()
    assert segment.turn_ends_A.tolist() == [False, True, True, False, True, True]
    described = describe_episode(
        Episode(segments=(segment,), text="", truncated=False, reward=None), prompt="", label=None
    )
    assert described["action_ranges"] == [(1, 3), (3, 4), (4, 6), (7, 8)]
    recorder.reward_turn(1.0)
    unknown = dataclasses.replace(recorder.segment(), turn_ends=None)  # as of a checkpoint that does not know
    assert unknown.turn_ends_A.tolist() == [False, False, False, False, True, True]


def test_a_reward_after_feedback_still_belongs_to_the_action_before_it():
    recorder = TokenRecorder([10])
    recorder.append_action(said([1]))
    recorder.append_observation([12, 13])
    recorder.reward_turn(2.0)
    assert recorder.segment().turn_rewards.tolist() == [0, 2.0, 0, 0]


def test_a_reward_before_any_action_is_refused():
    with pytest.raises(ValueError, match="before the first action"):
        TokenRecorder([1]).reward_turn(1.0)


def test_an_episode_begins_with_a_prompt():
    with pytest.raises(ValueError, match="at least one prompt token"):
        TokenRecorder([])


def test_recorder_column_of_logprobs_is_unknown_if_one_turn_has_none():
    recorder = TokenRecorder([1])
    recorder.append_action(said([2]))
    recorder.append_action(said([3], logprobs=False))
    assert recorder.segment().rollout_logprobs is None


def test_recorder_does_not_change_tokens_given_to_the_engine():
    recorder = TokenRecorder([1, 2])
    given_to_engine = recorder.token_ids
    recorder.append_action(said([3]))
    assert given_to_engine == [1, 2]


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 99), max_size=5)), max_size=8))
def test_columns_agree_whatever_is_appended(parts):
    recorder = TokenRecorder([0])
    expected, mask = [0], [False]
    for is_action, ids in parts:
        if is_action:
            recorder.append_action(said(ids))
        else:
            recorder.append_observation(ids)
        expected += ids
        mask += [is_action] * len(ids)
    segment = recorder.segment()
    assert segment.token_ids.tolist() == expected
    assert segment.action_mask.tolist() == mask


def test_seeds_depend_on_every_part_and_on_nothing_else():
    assert derive_seed(1, "train", 2, 3) == derive_seed(1, "train", 2, 3)
    parts = [(1, "train", 2, 3), (0, "train", 2, 3), (1, "eval", 2, 3), (1, "train", 23), (1, "train", 2, 4)]
    assert len({derive_seed(*p) for p in parts}) == len(parts)
    assert all(0 <= derive_seed(*p) < 2**63 for p in parts)


def picture(digest: str, tokens: int = 3) -> ImageInput:
    return ImageInput(tensors={}, token_ids=(90,) * tokens, placeholder=90, digest=digest)


def test_images_are_recorded_where_their_tokens_are():
    recorder = TokenRecorder([10, 90, 90, 90], [PlacedImage(1, picture("a"))])
    recorder.append_action(said([1, 2]))
    recorder.append_observation([90, 90, 12, 90], [PlacedImage(0, picture("b", 2)), PlacedImage(3, picture("c", 1))])
    asked_with = recorder.images
    recorder.append_action(said([3]))
    assert [(at, image.digest) for at, image in asked_with] == [(1, "a"), (6, "b"), (9, "c")]
    segment = recorder.segment()
    assert segment.images == asked_with
    assert segment.action_mask.tolist() == [False] * 4 + [True] * 2 + [False] * 4 + [True]


def test_an_image_that_is_not_where_it_should_be_is_refused():
    recorder = TokenRecorder([10, 11, 12, 13], [PlacedImage(1, picture("a"))])
    with pytest.raises(ValueError, match="the tokens from 1 on are not those of the image a"):
        recorder.segment()
