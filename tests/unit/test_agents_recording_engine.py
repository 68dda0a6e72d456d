"""The engine that remembers: what was sampled where, and the token histories behind an episode's calls."""

import asyncio
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import ScriptedEngine
from vision_models import image, vision_tokenizer

from openrlhf.agents.recording_engine import EngineCall, RecordingEngine, joined, segments_from_calls
from openrlhf.types import FinishReason, Generation, ImageInput, PlacedImage, SamplingParams, Supports


def call(prompt: str, answer: str, *, version: int = 0, reason: FinishReason = FinishReason.STOP) -> EngineCall:
    ids = [ord(c) for c in answer]
    generation = Generation(
        token_ids=ids, logprobs=[-i / 8 for i in range(len(ids))], versions=[version] * len(ids), finish_reason=reason
    )
    return EngineCall([ord(c) for c in prompt], generation)


def recording(*calls: EngineCall) -> RecordingEngine:
    engine = RecordingEngine(ScriptedEngine(lambda *_: []), sampling_params=SamplingParams(), max_length=100)
    for one in calls:
        engine.record(one)
    return engine


def match(engine: RecordingEngine, text: str) -> Generation | None:
    """`ab[CD]e`: brackets mark the range that is asked about."""
    start, end = text.index("["), text.index("]") - 1
    ids = [ord(c) for c in text if c not in "[]"]
    return engine.match_to_calls(ids, start, end)


def test_a_range_is_explained_by_the_call_with_the_tokens_before_it():
    engine = recording(call("ab", "CD", version=1), call("xb", "CD", version=2), call("abCDe", "F", version=3))
    found = match(engine, "ab[CD]eF")
    assert (found.versions, found.logprobs) == ([1, 1], [0.0, -0.125])
    assert match(engine, "abCDe[F]").versions == [3]
    assert match(engine, "ab[C]DeF").versions == [1]  # a part from the beginning
    assert match(engine, "abC[D]eF") is None  # no call read "abC"
    assert match(engine, "zb[CD]") is None
    assert match(engine, "ab[CX]") is None
    assert match(engine, "ab[CDe]F") is None  # "e" was not sampled


def test_answers_without_anything_between_them_explain_one_range():
    engine = recording(call("ab", "CD", version=1), call("abCD", "E", version=2))
    found = match(engine, "ab[CDE]")
    assert (found.versions, found.logprobs) == ([1, 1, 2], [0.0, -0.125, 0.0])


def test_a_range_has_the_routes_of_all_that_was_read_before_its_last_token():
    """Each call tells the experts of the tokens it has read: here their places, for the first call, and 100 more."""
    told = [
        call(prompt, answer)._replace(generation=routed(call(prompt, answer), first))
        for prompt, answer, first in (("ab", "CD", 0), ("abCD", "EF", 100))
    ]
    engine = recording(*told)
    assert match(engine, "ab[CD]").routes.ravel().tolist() == [0, 1, 2]
    assert match(engine, "ab[C]D").routes.ravel().tolist() == [0, 1]
    assert match(engine, "ab[CDEF]").routes.ravel().tolist() == [100, 101, 102, 103, 104]
    assert match(engine, "ab[CDE]F").routes.ravel().tolist() == [100, 101, 102, 103]
    (segment,) = segments_from_calls(told)
    assert segment.routes.ravel().tolist() == [100, 101, 102, 103, 104]


def test_supports_come_along_with_the_tokens_that_are_taken():
    """Answers that go on, one that is cut, and parts of a stream; a call without any had whole distributions."""

    def with_supports(prompt, answer, told):
        one = call(prompt, answer)
        return one._replace(generation=dataclasses.replace(one.generation, supports=Supports.of(told)))

    c, d, f = ord("C"), ord("D"), ord("F")
    first, second = with_supports("ab", "CD", [[c, 1], [d]]), with_supports("abCDe", "F", [None])
    engine = recording(first, second, call("abCD", "E"))
    assert match(engine, "ab[C]D").supports.tolist() == [[c, 1]]
    assert match(engine, "ab[CDE]").supports.tolist() == [[c, 1], [d], []]
    assert match(engine, "abCD[E]").supports is None
    (segment,) = segments_from_calls([first, second])
    assert segment.supports.tolist() == [[c, 1], [d], None]
    parts = [with_supports("ab", "C", [[c]]).generation, call("abC", "D").generation]
    assert joined([*parts, with_supports("abCD", "F", [[f, 2]]).generation]).supports.tolist() == [[c], [], [f, 2]]


def test_calls_tell_supports_as_the_episode_wants_them():
    """Whatever the parameters of a call say: they are a user's, who knows vLLM's names."""
    asked = []

    def answer(token_ids, params):
        asked.append(params.supports)
        return [5]

    for wanted in (64, 0):
        episode = SamplingParams(seed=1, supports=wanted)
        engine = RecordingEngine(ScriptedEngine(answer), sampling_params=episode, max_length=10)
        asyncio.run(engine.generate([1], SamplingParams(top_p=0.5, supports=3)))
    assert asked == [64, 0]


def routed(one: EngineCall, first: int) -> Generation:
    read = len(one.prompt_ids) + len(one.generation.token_ids) - 1
    return dataclasses.replace(one.generation, routes=(first + np.arange(read, dtype=np.uint8))[:, None, None])


def test_the_finish_reason_is_that_of_the_last_answer_if_it_was_kept_whole():
    engine = recording(call("ab", "CD", reason=FinishReason.LENGTH))
    assert match(engine, "ab[CD]").finish_reason is FinishReason.LENGTH
    assert match(engine, "ab[C]").finish_reason is FinishReason.STOP


def test_of_answers_that_begin_alike_the_one_that_fits_is_meant():
    engine = recording(call("ab", "C", version=1), call("ab", "CDE", version=2), call("ab", "CD", version=3))
    assert match(engine, "ab[C]").versions == [1]
    assert match(engine, "ab[CD]").versions == [3, 3]
    assert match(engine, "ab[CDE]").versions == [2, 2, 2]


def test_lists_that_users_go_on_writing_to_do_not_change_the_record():
    engine = RecordingEngine(ScriptedEngine(lambda *_: [5, 6]), sampling_params=SamplingParams(seed=1), max_length=10)
    tokens = [1, 2]
    said = asyncio.run(engine.generate(tokens, SamplingParams())).token_ids
    said += [7, 8]  # feedback, in place
    tokens += said
    assert engine.calls[0].token_ids == [1, 2, 5, 6]
    assert engine.match_to_calls(tokens, 2, 4).versions == [0, 0]
    assert engine.match_to_calls(tokens, 2, 5) is None


def shown(segments) -> list[str]:
    """Sampled tokens in capitals, as they were written."""
    return ["".join(map(chr, segment.token_ids.tolist())) for segment in segments]


def test_a_history_that_only_grows_is_one_segment():
    segments = segments_from_calls([call("ab", "CD", version=1), call("abCDe", "F", version=2)], reward=2.0)
    assert shown(segments) == ["abCDeF"]
    (segment,) = segments
    assert segment.action_mask.tolist() == [False, False, True, True, False, True]
    assert segment.versions.tolist() == [-1, -1, 1, 1, -1, 2]
    assert segment.turn_rewards.tolist() == [0, 0, 0, 0, 0, 2.0]


def test_a_rewritten_history_begins_a_segment_and_the_reward_stands_once():
    """The third call has lost "CD": a client that strips what it thought before."""
    segments = segments_from_calls(
        [call("ab", "CD"), call("abCDe", "F"), call("abe", "G"), call("abeGh", "I")], reward=1.0
    )
    assert shown(segments) == ["abCDeF", "abeGhI"]
    assert [segment.turn_rewards.sum().item() for segment in segments] == [0.0, 1.0]
    assert segments[1].turn_rewards[-1] == 1.0


def test_conversations_that_take_turns_are_a_segment_each():
    """Two helpers of one program; the one that was answered last comes last, with the reward."""
    segments = segments_from_calls(
        [call("ab", "C"), call("xy", "Z"), call("abCd", "E"), call("xyZw", "V"), call("abCdEf", "G")], reward=1.0
    )
    assert shown(segments) == ["xyZwV", "abCdEfG"]
    assert segments[1].turn_rewards.tolist() == [0.0] * 6 + [1.0]


def test_of_histories_that_begin_alike_the_longest_goes_on():
    segments = segments_from_calls([call("a", "B"), call("aB", "C"), call("a", "B"), call("aBCd", "E")])
    assert shown(segments) == ["aB", "aBCdE"]


def test_the_same_question_again_is_a_segment_of_its_own():
    assert shown(segments_from_calls([call("ab", "C"), call("ab", "D")])) == ["abC", "abD"]


def test_answers_without_tokens_leave_no_trace():
    assert segments_from_calls([call("ab", "")], reward=1.0) == ()
    assert shown(segments_from_calls([call("ab", "C"), call("abCd", ""), call("abCde", "F")])) == ["abCdeF"]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.booleans(), st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), min_size=1, max_size=3)
        ),
        min_size=1,
        max_size=6,
    )
)
def test_every_sampled_token_is_an_action_once_after_the_tokens_it_was_sampled_after(steps):
    """Random clients that either go on or begin anew. Every answer is an action once, of the segment whose tokens before
    it are its prompt; the last answer ends the last segment, and the reward stands there."""
    calls, history = [], []
    for turn, (goes_on, observation, answer) in enumerate(steps):
        prompt = (history if goes_on else [9]) + observation or [9]
        calls.append(
            EngineCall(
                prompt,
                Generation(
                    token_ids=answer, logprobs=None, versions=[turn] * len(answer), finish_reason=FinishReason.STOP
                ),
            )
        )
        history = calls[-1].token_ids
    segments = segments_from_calls(calls, reward=1.0)
    turns = []
    for segment in segments:
        versions = segment.versions.tolist()
        for turn in sorted(set(versions) - {-1}):
            first = versions.index(turn)
            assert segment.token_ids[:first].tolist() == calls[turn].prompt_ids
            assert segment.token_ids[segment.versions == turn].tolist() == calls[turn].generation.token_ids
            turns.append(turn)
    assert sorted(turns) == list(range(len(calls)))
    assert turns[-1] == len(calls) - 1
    assert sum(segment.turn_rewards.sum().item() for segment in segments) == 1.0
    assert segments[-1].turn_rewards[-1] == 1.0


def test_generate_takes_names_and_keeps_what_it_was_given():
    inner = ScriptedEngine(lambda prompt, params: [5, 6])
    engine = RecordingEngine(inner, sampling_params=SamplingParams(seed=1), max_length=10)
    ids, params = [1, 2], SamplingParams(max_tokens=50, seed=99, logprobs=False)
    generation = asyncio.run(engine.generate(prompt_token_ids=ids, sampling_params=params, multi_modal_data=None))
    ids.append(3)
    assert params == SamplingParams(max_tokens=50, seed=99, logprobs=False)
    assert engine.calls == [EngineCall([1, 2], generation)]
    assert inner.asked[0][1] == SamplingParams(max_tokens=8, seed=99)  # a seed of the user's own stays
    assert (engine.version, engine.max_model_len) == (0, inner.max_model_len)


def test_an_error_of_the_engine_is_remembered():
    class Gone(ScriptedEngine):
        async def generate(self, token_ids, sampling_params, images=()):
            raise ConnectionError("gone")

    engine = RecordingEngine(Gone(lambda *_: []), sampling_params=SamplingParams(), max_length=10)
    with pytest.raises(ConnectionError) as caught:
        asyncio.run(engine.generate([1], SamplingParams()))
    assert engine.failure is caught.value


# Images -------------------------------------------------------------------------------------------------------------


def picture(digest: str) -> ImageInput:
    """Of three tokens, which are `@` here."""
    return ImageInput(tensors={}, token_ids=(ord("@"),) * 3, placeholder=ord("@"), digest=digest)


def with_images(one: EngineCall, *images: tuple[int, str]) -> EngineCall:
    return one._replace(images=tuple(PlacedImage(at, picture(digest)) for at, digest in images))


def places(images) -> list[tuple[int, str]]:
    return [(at, image.digest) for at, image in images]


def test_calls_with_other_images_of_the_same_size_are_other_histories():
    """The tokens are the same: the images alone tell that the second call does not go on from the first."""
    segments = segments_from_calls(
        [
            with_images(call("a@@@", "B"), (1, "x")),
            with_images(call("a@@@Bc", "D"), (1, "y")),
            with_images(call("a@@@Bc@@@", "E"), (1, "x"), (6, "z")),
        ]
    )
    assert ["".join(map(chr, s.token_ids.tolist())) for s in segments] == ["a@@@BcD", "a@@@Bc@@@E"]
    assert [places(s.images) for s in segments] == [[(1, "y")], [(1, "x"), (6, "z")]]


def test_an_answer_belongs_to_the_images_before_it():
    engine = recording(
        with_images(call("a@@@", "B", version=1), (1, "x")), with_images(call("a@@@", "B", version=2), (1, "y"))
    )
    ids = [ord(c) for c in "a@@@Bc@@@"]
    for digest, versions in (("x", [1]), ("y", [2])):
        images = [PlacedImage(1, picture(digest)), PlacedImage(6, picture("later"))]
        assert engine.match_to_calls(ids, 4, 5, images).versions == versions
    assert engine.match_to_calls(ids, 4, 5, [PlacedImage(1, picture("z"))]) is None


def asked_with(*questions, kind="qwen2_5_vl"):
    """An episode's engine after these questions (text, images), and the scripted one behind it."""
    tokenizer = vision_tokenizer(kind)
    inner = ScriptedEngine(lambda *_: tokenizer("5")["input_ids"])
    engine = RecordingEngine(inner, sampling_params=SamplingParams(), max_length=500, images=tokenizer.episode_images)

    async def main():
        for token_ids, images in questions:
            await engine.generate(token_ids, SamplingParams(), multi_modal_data=images)

    asyncio.run(main())
    return engine, inner


def test_one_token_for_an_image_or_all_of_them_is_the_same_question():
    tokenizer = vision_tokenizer("qwen2_5_vl")
    text = "ab<|vision_start|><|image_pad|><|vision_end|>c"
    once = tokenizer(text)["input_ids"]
    whole = tokenizer.episode_images.expand(text, [tokenizer.episode_images.prepare_one(image(1))])
    engine, inner = asked_with(
        (once, {"image": image(1)}), (whole.token_ids, {"image": [image(1)]}), (tokenizer("ab")["input_ids"], {})
    )
    assert [ids for ids, _ in inner.asked] == [whole.token_ids, whole.token_ids, tokenizer("ab")["input_ids"]]
    assert inner.shown == [whole.images, whole.images, ()]
    assert [c.images for c in engine.calls] == inner.shown
    assert engine.calls[0].images[0].image is inner.shown[0][0].image  # not a copy of its tensors


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"image": []}, "stands for an image"),
        (None, "stands for an image"),
        ({"image": [1, 2]}, "an image must be"),
        ({"video": 1}, "multi_modal_data must be"),
        ([3], "multi_modal_data must be"),
    ],
)
def test_images_that_do_not_fit_the_tokens_are_an_error(data, text):
    once = vision_tokenizer("qwen2_5_vl")("a<|image_pad|>")["input_ids"]
    with pytest.raises(ValueError, match=text):
        asked_with((once, data))
