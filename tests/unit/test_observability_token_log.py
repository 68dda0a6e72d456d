"""The token log: what is written comes back, to the bit; what is torn is told; a resumed run has one history."""

import dataclasses
import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from small_tokenizers import tokenizer

from openrlhf.observability.token_log import (
    ALL,
    TOKEN_COLUMNS,
    Pieces,
    TokenBytes,
    TokenLog,
    TokenLogError,
    read_groups,
    read_index,
    read_step,
    steps,
)
from openrlhf.types import Group, ImageInput, Outcome, PlacedImage, Prompt, SampleKey, Segment, Supports, Trajectory


class LetterTokenizer:
    """Token i is the letter with that number."""

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(number) for number in ids)


def segment(*, tokens: int = 6, seed: int = 0, **changes) -> Segment:
    """An observation of two tokens, an action of two, an observation, and an action to the end."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(tokens) >= 2
    mask[4] = False
    ends = torch.zeros(tokens, dtype=torch.bool)
    ends[3] = ends[-1] = True
    made = Segment(
        token_ids=torch.randint(97, 123, (tokens,), generator=generator),
        action_mask=mask,
        rollout_logprobs=torch.where(mask, -torch.rand(tokens, generator=generator), 0.0),
        versions=torch.where(mask, 7, -1).int(),
        turn_rewards=torch.where(ends, torch.rand(tokens, generator=generator), 0.0),
        turn_ends=ends,
    )
    return dataclasses.replace(made, **changes)


def image(seed: int) -> ImageInput:
    pixels = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed))
    grid = torch.tensor([[1, 2, 3]])
    return ImageInput(
        tensors={"pixel_values": pixels, "image_grid_thw": grid},
        token_ids=(9, 9),
        placeholder=9,
        digest=f"{seed:032x}",
        thumbnail=b"\x89PNG",
        size=(24, 16),
    )


def with_image(seed: int) -> Segment:
    ids = torch.tensor([1, 9, 9, 4, 5])
    return segment(
        tokens=5,
        token_ids=ids,
        action_mask=torch.tensor([False] * 3 + [True] * 2),
        images=(PlacedImage(1, image(seed)),),
        turn_ends=None,
    )


def routed(dtype: torch.dtype, seed: int) -> Segment:
    routes = torch.randint(0, 100, (4, 2, 3), generator=torch.Generator().manual_seed(seed)).to(dtype)
    return segment(seed=seed, routes=routes)


def episode(ordinal: int, sample: int, *segments: Segment, **fields) -> Trajectory:
    fields = {"outcome": Outcome.FINISHED, "reward": 1.0, "score": 1.0, "text": "ask"} | fields
    return Trajectory(key=SampleKey(ordinal, sample), segments=segments, **fields)


def group(ordinal: int, *trajectories: Trajectory, **prompt) -> Group:
    fields = {"text": "ask", "label": "yes"} | prompt
    return Group(prompt=Prompt(ordinal=ordinal, **fields), trajectories=trajectories)


def failed(ordinal: int, sample: int, error: str = "agent.py:3 KeyError\n  in step") -> Trajectory:
    return episode(ordinal, sample, outcome=Outcome.FAILED, reward=None, score=None, error=error)


def plain(ordinal: int, *rewards: float) -> Group:
    return group(ordinal, *(episode(ordinal, i, segment(seed=i), reward=r) for i, r in enumerate(rewards)))


def no_columns(keys):
    return {}


def write(run: Path, *steps_of_groups: list[Group], columns=no_columns, first=1, **options) -> TokenLog:
    log = TokenLog(run, LetterTokenizer(), **{"groups": ALL} | options)
    for step, groups in enumerate(steps_of_groups, start=first):
        log.write(step, groups, columns)
    log.close()
    return log


def assert_same(one, other) -> None:
    """Records are equal in every field, tensors in every bit."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.numpy().tobytes() == other.numpy().tobytes()
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, float) and math.isnan(one):
        assert math.isnan(other)
    else:
        assert one == other


ROUNDS = {
    "several turns and segments": [
        group(3, episode(3, 0, segment(), segment(seed=1, tokens=9), segment(seed=2)), episode(3, 1, segment(seed=3)))
    ],
    "failed and truncated": [
        group(0, failed(0, 0), episode(0, 1, segment(), outcome=Outcome.TRUNCATED, reward=-0.5, score=0.0)),
        group(1, failed(1, 0), failed(1, 1)),
    ],
    "numbers that are not finite": [
        group(
            2,
            episode(2, 0, segment(rollout_logprobs=torch.full((6,), -math.inf)), reward=math.nan, score=math.inf),
            episode(2, 1, segment(turn_rewards=torch.full((6,), math.nan)), reward=0.1 + 0.2, reward_size=1e-300),
        )
    ],
    "columns that are not there": [
        group(1, episode(1, 0, segment(rollout_logprobs=None)), episode(1, 1, segment(turn_ends=None)))
    ],
    "images": [
        group(4, episode(4, 0, with_image(1), with_image(2)), episode(4, 1, with_image(1)), images=("a.png",)),
        group(5, episode(5, 0, with_image(2))),
    ],
    "routes": [
        group(
            6,
            episode(6, 0, routed(torch.uint8, 0), segment(seed=5), routed(torch.int16, 1)),
            episode(6, 1, routed(torch.uint8, 2)),
        )
    ],
    "supports": [
        group(
            6,
            episode(6, 0, segment(supports=Supports.of([[97, 5], [], None])), segment(seed=5)),
            episode(6, 1, segment(seed=2, supports=Supports.of([[1], [1, 2, 3], []]))),
        )
    ],
    "odd ids": [group(7, episode(7, 0, segment(token_ids=torch.tensor([0, 2**31 - 1, 97, 97, 5, 1_200_000]))))],
    "ids of 64 bits": [group(7, episode(7, 0, segment(token_ids=torch.tensor([0, 2**40, 97, 97, 5, 97]))))],
    "words": [
        group(
            8,
            episode(8, 0, segment(), text="ü \ud800 \x00", extra_logs={"depth": 3.0, "odd": math.inf}),
            text="Wie groß?",
            label={"answer": [1, 2.5, None], "name": "é"},
            datasource="maths",
            where="record 8 of train.jsonl",
        )
    ],
    "nothing": [],
}


@pytest.mark.parametrize("groups", ROUNDS.values(), ids=ROUNDS)
def test_groups_come_back_to_the_bit(tmp_path, groups):
    write(tmp_path, groups)
    assert_same(read_groups(tmp_path / "tokens" / "step_000001.npz"), groups)


def test_an_image_is_written_once_for_the_whole_run(tmp_path):
    groups = ROUNDS["images"]
    write(tmp_path, groups, groups)
    assert len(list((tmp_path / "tokens" / "images").iterdir())) == 2
    assert {file.name for file in (tmp_path / "rollout_images").iterdir()} == {f"{seed:032x}.png" for seed in (1, 2)}
    (placed,) = read_step(steps(tmp_path)[2]).groups[1].samples[0].segments[0].images
    assert placed == (1, 2, f"{2:032x}", (24, 16), f"rollout_images/{2:032x}.png")


def test_a_label_that_json_does_not_know_is_its_text(tmp_path):
    write(tmp_path, [group(0, episode(0, 0, segment()), label=(1, {2}))])
    (found,) = read_groups(steps(tmp_path)[1])
    assert found.prompt.label == "(1, {2})"


def trained(keys):
    """Samples 0 of all prompts were trained on: the advantages of segment s begin with s."""
    return {
        key: {"advantages": np.arange(3, dtype=np.float32) + key.segment, "new_logprobs": np.full(3, -2, np.float32)}
        for key in keys
        if key.sample == 0
    }


def test_columns_of_the_trainer_lie_on_action_tokens(tmp_path):
    """Actions are the tokens 2, 3 and 5. With one optimizer step the old log-probs are the new ones, kept once."""
    write(tmp_path, [group(3, episode(3, 0, segment(), segment(seed=1)), episode(3, 1, segment()))], columns=trained)
    step = read_step(steps(tmp_path)[1])
    (found,) = step.groups
    first, second = found.samples[0].segments
    (other,) = found.samples[1].segments
    assert first.columns["advantages"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(second.per_token("advantages"), [np.nan, np.nan, 1, 2, np.nan, 3])
    assert first.columns["old_logprobs"].tolist() == [-2, -2, -2]
    assert [s.is_trained for s in (first, second, other)] == [True, True, False]
    assert np.isnan(other.columns["advantages"]).all()
    assert first.per_token("values") is None
    assert step.column_names == (*TOKEN_COLUMNS, "advantages", "old_logprobs", "new_logprobs")
    with zipfile.ZipFile(step.path) as archive:
        assert "old_logprobs.npy" not in archive.namelist()


def test_the_index_is_read_without_columns(tmp_path):
    write(tmp_path, [plain(0, 1.0, 0.0)], columns=trained)
    index = read_index(steps(tmp_path)[1])
    (found,) = index.groups[0].samples[0].segments
    assert (found.num_tokens, found.num_actions, found.columns, len(index.pieces)) == (6, 3, {}, 0)
    some = read_step(steps(tmp_path)[1], columns=["advantages"]).groups[0].samples[1].segments[0]
    assert set(some.columns) == {"action", "advantages"}


def test_some_groups_are_for_people(tmp_path):
    """Two places: the best and the worst, with all of their samples, but neither routes nor tensors of images."""
    ends = [plain(0, 1.0, 1.0), group(1, episode(1, 0, with_image(1), routed(torch.uint8, 0), reward=0.5))]
    write(tmp_path, [ends[1], plain(2, 0.0), ends[0], plain(3, 0.7)], groups=2)
    step = read_step(steps(tmp_path)[1])
    assert [(g.ordinal, g.choice, len(g.samples)) for g in step.groups] == [(0, "best", 2), (2, "worst", 1)]
    assert not step.complete
    with pytest.raises(TokenLogError, match=r"2 groups of its step.*--logger\.rollouts_per_step -1"):
        read_groups(step.path)
    assert not (tmp_path / "tokens" / "images").exists()


def test_none_are_kept(tmp_path):
    log = write(tmp_path, [plain(0, 1.0)], groups=0)
    assert not log.wants(1)
    assert list(tmp_path.iterdir()) == []
    assert steps(tmp_path) == {}


def test_a_long_run_keeps_fewer_steps_unless_all_are_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("openrlhf.observability.token_log.THINNED", ((1, 3),))
    rounds = [[plain(step, 1.0)] for step in range(7)]
    write(tmp_path / "some", *rounds, groups=4)
    write(tmp_path / "all", *rounds)
    assert list(steps(tmp_path / "some")) == [1, 2, 3, 6]
    assert list(steps(tmp_path / "all")) == [1, 2, 3, 4, 5, 6, 7]


def test_a_resumed_run_replaces_what_it_does_again(tmp_path):
    """Four steps, and drafts of a run that was killed; it goes on after step 2, and step 3 is another one."""
    write(tmp_path, *([plain(step, 1.0)] for step in range(4)))
    (tmp_path / "tokens" / "step_000005.77.partial").write_bytes(b"half")
    log = TokenLog(tmp_path, LetterTokenizer(), groups=ALL)
    log.begin(after=2)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["step_000001.npz", "step_000002.npz"]
    log.write(3, [plain(30, 1.0)], no_columns)
    log.close()
    assert [read_index(path).groups[0].ordinal for path in steps(tmp_path).values()] == [0, 1, 30]


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_torn_file_is_told(tmp_path, kept):
    write(tmp_path, [plain(0, 1.0)])
    path = steps(tmp_path)[1]
    content = path.read_bytes()
    path.write_bytes(content[: kept if kept > 1 else int(kept * len(content))])
    with pytest.raises(TokenLogError, match=r"step_000001\.npz is no whole file of the token log"):
        read_step(path)
    with pytest.raises(FileNotFoundError):
        read_step(path.with_name("step_000002.npz"))


def test_a_missing_image_is_told(tmp_path):
    write(tmp_path, ROUNDS["images"])
    (tmp_path / "tokens" / "images" / f"{1:032x}.npz").unlink()
    with pytest.raises(TokenLogError, match="is missing: an image that the step was trained on"):
        read_groups(steps(tmp_path)[1])


def test_a_disk_that_is_full_costs_the_file_and_not_the_run(tmp_path, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", full)
        write(tmp_path, [plain(0, 1.0)])
    assert "could not be written" in caplog.text
    assert list((tmp_path / "tokens").iterdir()) == []
    write(tmp_path, [plain(1, 1.0)], first=2)
    assert list(steps(tmp_path)) == [2]


def test_the_file_is_plain_numpy_and_json(tmp_path):
    """As a reader without this module would read it."""
    write(tmp_path, [plain(0, 1.0, 0.5), plain(1, 0.0)], columns=trained)
    with np.load(tmp_path / "tokens" / "step_000001.npz", allow_pickle=False) as archive:
        index = json.loads(archive["index"].tobytes())
        assert archive["token_ids"].dtype == np.int32
        assert archive["action"].sum() == len(archive["advantages"]) == 3 * 3
        assert index["groups"][0]["samples"][1]["segments"][0]["tokens"] == 6


TEXTS = ["the answer is 5.", " a cat – naïve 日本 🙂 </s> <|start|>user: hello world\n\n", "€"]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_joined_are_the_decoded_text(kind, text):
    """Of characters that several tokens share too; a SentencePiece tokenizer takes the first space away."""
    made = tokenizer(kind)
    ids = made.encode(text, add_special_tokens=False)
    bytes_of = TokenBytes(made)
    pieces = Pieces({token: bytes_of(token) for token in ids})
    decoded = made.decode(ids, skip_special_tokens=False)
    assert pieces.text(ids).strip() == decoded.strip()
    assert "".join(pieces.texts(ids)) == pieces.text(ids)


def test_a_part_of_a_character_is_shown_as_its_bytes():
    """€ is e2 82 ac; in `texts` it is the last token's."""
    pieces = Pieces({1: b"a\xe2\x82", 2: b"\xac", 3: b"\xff"})
    assert [pieces[token] for token in (1, 2, 3)] == ["a<0xE2><0x82>", "<0xAC>", "<0xFF>"]
    assert pieces.texts([1, 2]) == ["a", "€"]
    assert pieces.texts([1, 3, 1]) == ["a", "\ufffd\ufffd", "a\ufffd"]


def test_ids_beyond_the_vocabulary_are_empty():
    made = tokenizer("byte_level")
    assert TokenBytes(made)(len(made) + 5) == b""
