"""Drafts of the next tokens: where they come from, how long they are, and when there are none. No vLLM is needed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.rollout.base import DraftCounts
from openrlhf.rollout.vllm import speculation
from openrlhf.rollout.vllm.speculation import (
    DraftGate,
    DraftTally,
    HistoryDrafts,
    Responses,
    draft_room,
    longest_match,
)

PROMPT = [1, 2, 3, 4, 5]


def row(*tokens: int) -> np.ndarray:
    return np.array([*PROMPT, *tokens], np.int32)


def history(*responses: list[int], **options: int) -> HistoryDrafts:
    drafts = HistoryDrafts(Responses(**options))
    for number, response in enumerate(responses):
        drafts.end(f"old{number}", PROMPT, response)
    return drafts


def draft(drafts: HistoryDrafts, *tokens: int, name: str = "new", room: int = 3) -> list[int]:
    return drafts.draft(name, row(*tokens), prompt_length=len(PROMPT), room=room)


@given(
    stream=st.lists(st.integers(-1, 3), min_size=1, max_size=30),
    recent=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    shortest=st.integers(1, 4),
)
def test_the_longest_match_is_the_one_that_a_search_of_all_places_finds(stream, recent, shortest):
    def length_at(end: int) -> int:
        """Tokens before and at `end` that agree with the end of `recent`."""
        pairs = zip(reversed(stream[: end + 1]), reversed(recent), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(end + 1, len(recent)))

    places = [(length_at(end), end + 1) for end in range(len(stream) - 1) if stream[end + 1] != -1]
    best = max(places, default=(0, 0))
    expected = best[1] if best[0] >= shortest else None
    assert longest_match(np.array(stream), np.array(recent), shortest=shortest) == expected


def test_a_draft_is_how_an_earlier_response_went_on():
    """The prompt's end and the first token are enough to find the beginning of a response."""
    drafts = history([10, 11, 12, 13, 14])
    assert draft(drafts, 10) == [11, 12, 13]
    assert draft(drafts, 10, 11, 12) == [13, 14]  # two were kept, and the response has two more
    assert draft(drafts, 10, 11, 12, 13, 14) == []


def test_a_request_that_leaves_a_response_looks_for_its_last_tokens_in_all_of_them():
    drafts = history([10, 11, 12, 13, 14], [20, 21, 22, 23])
    assert draft(drafts, 10) == [11, 12, 13]
    assert draft(drafts, 10, 20) == []  # two tokens that never followed each other
    assert draft(drafts, 10, 20, 21, 22) == [23]


def test_the_newest_of_equal_matches_is_followed():
    assert draft(history([10, 11], [10, 12]), 10) == [12]


def test_steps_in_which_nobody_asked_are_made_up_for():
    drafts = history([10, 11, 12, 13, 14, 15])
    assert draft(drafts, 10, room=1) == [11]
    assert draft(drafts, 10, 11, 12, 13, room=1) == [14]


def test_other_prompts_have_other_histories():
    drafts = history([10, 11, 12])
    assert drafts.draft("other", np.array([9, *PROMPT[1:], 10]), prompt_length=len(PROMPT), room=3) == []


def test_responses_are_bounded_by_prompt_and_altogether():
    """Every response has two tokens of its prompt and a mark before it."""
    responses = Responses(max_tokens=19, per_prompt=2, context=2)
    for token in (10, 20, 30):
        responses.add([1, 2, 3], [token, token + 1])
    stream = responses.stream(Responses.key([1, 2, 3]))
    assert stream is not None
    assert stream.tolist() == [-1, 2, 3, 20, 21, -1, 2, 3, 30, 31]
    responses.add([4], [40, 41, 42])
    assert responses.num_tokens == 15
    responses.stream(Responses.key([1, 2, 3]))  # used last
    responses.add([5], [50, 51, 52])
    assert responses.num_tokens == 15
    assert responses.stream(Responses.key([4])) is None
    responses.add([6], [])
    assert responses.num_tokens == 15


def test_a_step_has_no_more_tokens_than_its_weights_are_read_for():
    assert [draft_room(requests, 4) for requests in (1, 51, 52, 85, 86, 128, 129, 512)] == [4, 4, 3, 2, 1, 1, 0, 0]
    assert draft_room(0, 4) == 4


def test_drafts_are_counted_by_what_the_next_step_yields():
    """a: 3 drafted, 2 kept; 1 drafted, kept; then nothing was asked. b: 2 drafted, none kept. c: room, but no draft."""
    tally = DraftTally()
    for name in "abc":
        tally.sampled(name, 1)
    for name, tokens in (("a", 3), ("b", 2), ("c", 0)):
        tally.drafted(name, tokens)
    for name, tokens in (("a", 3), ("b", 1), ("c", 1)):
        tally.sampled(name, tokens)
    tally.drafted("a", 1)
    tally.drafted("b", 2)
    tally.end("b")
    tally.sampled("a", 2)
    tally.sampled("a", 1)
    counts = tally.take()
    assert counts == DraftCounts(steps=8, tokens=11, open_steps=4, drafted=6, accepted=3)
    assert counts.gain == 0.75
    assert tally.take() == DraftCounts()
    assert counts + counts == DraftCounts(steps=16, tokens=22, open_steps=8, drafted=12, accepted=6)


def test_drafts_rest_after_a_round_in_which_they_did_not_pay(monkeypatch):
    monkeypatch.setattr(speculation, "REST", 2)
    poor = DraftCounts(open_steps=1000, accepted=249)
    gate = DraftGate()
    assert gate.after(DraftCounts(open_steps=1000, accepted=250)) is None
    assert gate.after(DraftCounts(open_steps=511)) is None  # too few to tell
    assert gate.open
    assert (
        gate.after(poor) == "are off for 2 rounds: they added 0.25 tokens to a step, and what they cost is about 0.25"
    )
    assert not gate.open
    assert gate.after(DraftCounts()) is None
    assert gate.after(DraftCounts()) == "are tried again"
    assert gate.open
    assert "are off" in (gate.after(poor) or "")


@pytest.mark.parametrize("kind", ["ngram", "suffix", "history"])
def test_engines_are_asked_for_drafts_in_vllms_words(kind):
    from openrlhf.rollout.vllm.settings import VllmSettings, engine_arguments

    settings = VllmSettings(model="m", max_model_len=64, max_num_seqs=8, speculation=kind, speculation_tokens=5)
    arguments = engine_arguments(settings, gpu=True)
    assert arguments["speculative_config"]["method"] == ("suffix" if kind == "suffix" else "ngram")
    assert arguments["speculative_config"]["num_speculative_tokens"] == 5
    assert arguments["compilation_config"]["cudagraph_capture_sizes"][-1] == 256
