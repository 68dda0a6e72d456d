"""State on disk: exact, lazy, in bounded files; and whole checkpoints of several ranks."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from small_sections import optimizer
from thread_ranks import outcomes
from torch import nn

from openrlhf.backends.state import NotFiniteError
from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.folder import CheckpointError, CheckpointFolder, Retention
from openrlhf.checkpoint.manager import CheckpointManager, LocalCheckpointedModel, find_checkpoint
from openrlhf.checkpoint.training_state import (
    random_state,
    read_state,
    read_training_state,
    restore_random_state,
    write_state,
    write_training_state,
)


class TestTrainingState:
    def test_exact_to_the_bit(self, tmp_path):
        tensors = {
            "parameters/a": torch.tensor([1e-45, -0.0, float("nan"), 1 / 3]),
            "step/a": torch.tensor(3.0),
            "exp_avg/a": torch.randn(4, 5).T,
            "parameters/empty": torch.zeros(0, 3),
        }
        write_training_state(tmp_path / "t", {"steps": 3}, tensors.items())
        numbers, saved = read_training_state(tmp_path / "t")
        assert numbers == {"steps": 3}
        assert list(saved) == list(tensors)
        for name, tensor in tensors.items():
            assert saved[name].shape == tensor.shape
            assert saved[name].numpy().tobytes() == tensor.numpy().tobytes(order="C")

    def test_files_are_bounded_and_read_when_asked_for(self, tmp_path):
        """Tensors of 40 bytes into files of 100: two each; a larger one gets a file of its own."""
        tensors = [(f"parameters/{i}", torch.full((10,), float(i))) for i in range(5)]
        tensors.insert(2, ("parameters/large", torch.zeros(100)))
        write_training_state(tmp_path / "t", {}, tensors, shard_bytes=100)
        files = sorted(p.name for p in (tmp_path / "t").glob("*.safetensors"))
        assert len(files) == 4
        _, saved = read_training_state(tmp_path / "t")
        (tmp_path / "t" / files[-1]).unlink()
        assert "parameters/4" in saved, "nothing is read to know that"
        assert saved["parameters/0"].tolist() == [0.0] * 10
        with pytest.raises(FileNotFoundError):
            saved["parameters/4"]

    def test_a_tensor_may_change_as_soon_as_the_next_is_asked_for(self, tmp_path):
        def reused():
            buffer = torch.zeros(2)
            for i in range(3):
                yield f"parameters/{i}", buffer.fill_(i)

        write_training_state(tmp_path / "t", {}, reused())
        _, saved = read_training_state(tmp_path / "t")
        assert [saved[f"parameters/{i}"].tolist() for i in range(3)] == [[0, 0], [1, 1], [2, 2]]

    def test_who_does_not_write_iterates_all_the_same(self, tmp_path):
        seen = []
        write_training_state(
            tmp_path / "t", {}, ((f"p/{i}", seen.append(i) or torch.zeros(0)) for i in range(3)), writes=False
        )
        assert seen == [0, 1, 2]
        assert not (tmp_path / "t").exists()

    def test_who_fails_to_write_iterates_to_the_end(self, tmp_path):
        """Others wait in the collective for every tensor. Here the folder vanishes under the writer."""
        seen = []

        def tensors():
            for i in range(5):
                if i == 1:
                    (tmp_path / "t").rmdir()
                seen.append(i)
                yield f"parameters/{i}", torch.zeros(30)

        with pytest.raises(OSError, match="tensors-00001"):
            write_training_state(tmp_path / "t", {}, tensors(), shard_bytes=100)
        assert seen == [0, 1, 2, 3, 4]


class TestNestedState:
    def test_comes_back(self, tmp_path):
        state = {
            "a": {"table": torch.tensor([[1.0, float("nan")]]), "n": 3},
            "list": [torch.arange(2), None, 0.1],
            "x": {},
        }
        write_state(tmp_path, state)
        same = read_state(tmp_path)
        assert torch.equal(same["a"]["table"], state["a"]["table"]) is False, "NaN is not equal to itself"
        assert torch.allclose(same["a"]["table"], state["a"]["table"], equal_nan=True)
        assert same["list"][0].tolist() == [0, 1]
        assert (same["list"][1:], same["a"]["n"], same["x"]) == ([None, 0.1], 3, {})

    def test_needs_no_tensors(self, tmp_path):
        write_state(tmp_path, {"n": 1})
        assert read_state(tmp_path) == {"n": 1}
        assert not (tmp_path / "state.safetensors").exists()

    @pytest.mark.parametrize("key", [1, "$tensor"])
    def test_keys_that_json_would_change_are_refused(self, tmp_path, key):
        with pytest.raises(TypeError, match="the key"):
            write_state(tmp_path, {"a": {key: 2}})


def test_generators_go_on_where_they_stood(tmp_path):
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))

    draw()
    random.gauss(0, 1)  # keeps half a pair for the next call
    write_state(tmp_path, random_state())
    drawn = draw()
    draw()
    restore_random_state(read_state(tmp_path))
    assert draw() == drawn


class ShardedBackend:
    """Whole tensors on the main rank only, and every rank must ask for each: `gather` would wait otherwise."""

    def __init__(self, ranks, value=0.0):
        self.ranks, self.module = ranks, nn.Linear(2, 1)
        self.value = torch.full((3,), value)

    def require_finite(self):
        return []

    def weights_to_save(self):
        import contextlib

        return contextlib.nullcontext()

    def scalar_state(self):
        return {"steps": 1}

    def tensor_state(self):
        for name in ("parameters/a", "exp_avg/a"):
            self.ranks.gather(name)
            yield name, self.value if self.ranks.is_main else torch.zeros(0)

    def load(self, numbers, tensors):
        self.value = tensors["parameters/a"]


def manager(path, ranks, backend, *, found=None, identity=None, export=None, settings=None):
    folder = CheckpointFolder(path, Retention())

    def export_model(target: Path, state, weights):
        target.mkdir()
        (target / "config.json").write_text(str(state["n"]))

    if ranks.is_main:
        folder.open()
    return CheckpointManager(
        folder, {"model": LocalCheckpointedModel(backend, export or export_model, ranks)}, found=found, identity=identity or {"seed": "1"},
        notes={"run_directory": "runs/x"}, ranks=ranks, settings=settings,
    )  # fmt: skip


def test_several_ranks_write_one_checkpoint_and_all_continue_from_it(tmp_path):
    def save(ranks):
        manager(tmp_path, ranks, ShardedBackend(ranks, 0.5)).save(7, {"n": 3})

    assert outcomes(3, save) == [None] * 3
    assert (tmp_path / "global_step7" / "model" / "config.json").read_text() == "3"

    def load(ranks):
        backend = ShardedBackend(ranks)
        found = find_checkpoint(CheckpointFolder(tmp_path, Retention()), ranks=ranks)
        folder = CheckpointFolder(tmp_path, Retention())
        kept = CheckpointManager(
            folder,
            {"model": LocalCheckpointedModel(backend, None, ranks)},
            found=found,
            identity={"seed": "1"},
            notes={},
            ranks=ranks,
        )
        return kept.load(lambda state: None), backend.value.tolist(), found.notes

    assert outcomes(4, load) == [({"n": 3}, [0.5] * 3, {"run_directory": "runs/x"})] * 4


def test_checkpoint_failure_on_the_main_rank_fails_on_all(tmp_path):
    def save(ranks):
        def full(target, state, weights):
            raise OSError(28, "No space left on device")

        manager(tmp_path, ranks, ShardedBackend(ranks), export=full).save(7, {"n": 3})

    errors = outcomes(2, save)
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert "No space left on device" in str(errors[1])
    assert [p.name for p in tmp_path.iterdir() if p.name != ".lock"] == []


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    class Broken(ShardedBackend):
        def require_finite(self):
            raise NotFiniteError("weights are not finite: a")

    def save(ranks):
        manager(tmp_path, ranks, ShardedBackend(ranks)).save(7, {"n": 3})
        manager(tmp_path, ranks, Broken(ranks)).save(8, {"n": 4})

    assert [str(error) for error in outcomes(2, save)] == ["nothing is saved: weights are not finite: a"] * 2
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != ".lock") == ["global_step7", "latest"]


class TestWhatCannotBeContinued:
    @staticmethod
    def saved(tmp_path, **options):
        from openrlhf.backends.ranks import ALONE

        kept = manager(tmp_path, ALONE, TorchBackend(nn.Linear(4, 3), optimizer(lr=0.1)), **options)
        kept.save(1, {"n": 0})
        kept._folder.close()
        return find_checkpoint(CheckpointFolder(tmp_path, Retention()))

    def test_another_run(self, tmp_path):
        found = self.saved(tmp_path, identity={"what is trained": "sft"})
        with pytest.raises(
            CheckpointError, match=r"global_step1 cannot be continued: what is trained was sft, and is dpo"
        ):
            found.require_same({"what is trained": "dpo"})

    def test_another_model(self, tmp_path):
        from openrlhf.backends.ranks import ALONE

        found = self.saved(tmp_path)
        other = TorchBackend(nn.Linear(5, 3), optimizer(lr=0.1))
        with pytest.raises(CheckpointError, match=r"has shape \(3, 4\), in this run \(3, 5\)"):
            manager(tmp_path, ALONE, other, found=found).load(lambda state: None)

    def test_an_older_checkpoint_that_knows_less_of_its_run(self, tmp_path):
        self.saved(tmp_path, identity={"seed": "1"}).require_same({"seed": "1", "--train.batch_size": "8"})

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "JSONDecodeError"),
            (b"\xff\xfe\x00", "UnicodeDecodeError"),
            (b"[1, 2]", "it is a list, not an object"),
            (b"null", "it is a NoneType, not an object"),
            (b'{"step": 3, "model": "theirs"}', "its 'resumable' is missing or of another kind"),
            (
                b'{"resumable": true, "identity": [], "notes": {}, "random": [], "loop": {}}',
                "its 'identity' is missing",
            ),
            (b'{"loop": {"$tensor": "/loop"}}', "KeyError: '/loop'"),
        ],
    )
    def test_a_state_that_is_not_ours(self, tmp_path, content, why):
        """The checkpoint is whole as far as its manifest knows."""
        folder = self.written(tmp_path, content)
        with pytest.raises(CheckpointError) as refused:
            find_checkpoint(folder)
        assert str(refused.value).startswith(f"{tmp_path}/global_step1/state.json does not hold what a checkpoint")
        assert why in str(refused.value)
        assert "remove its checkpoint to go on from the one before, or name another --ckpt.path" in str(refused.value)

    @pytest.mark.parametrize(
        "part", [{"random": [{}]}, {"loop": {}}, {"loop": {"n": []}}], ids=["random", "no n", "list"]
    )
    def test_a_part_of_it_that_is_not_ours(self, tmp_path, part):
        from openrlhf.backends.ranks import ALONE

        found = self.saved(tmp_path)
        found.state.update(part)
        kept = CheckpointManager(found.path.parent, {}, found=found, identity={}, notes={}, ranks=ALONE)
        with pytest.raises(CheckpointError, match=r"global_step1/state\.json does not hold what a checkpoint"):
            kept.load(lambda state: 1 + state["n"])

    @staticmethod
    def written(tmp_path, content: bytes) -> CheckpointFolder:
        folder = CheckpointFolder(tmp_path, Retention())
        (folder.begin(1) / "state.json").write_bytes(content)
        folder.commit(1)
        return folder


THEN = {"actor.adam.lr": 1e-6, "data.max_len": 64, "eval.dataset": None, "rollout.top_k": -1}


class TestSettingsThatChange:
    def test_one_line_for_each(self, tmp_path, caplog):
        from openrlhf.backends.ranks import ALONE

        saved = TestWhatCannotBeContinued.saved(tmp_path, settings=THEN)
        now = THEN | {"actor.adam.lr": 5e-7, "eval.dataset": "held-out.jsonl", "new.flag": 3}
        kept = manager(tmp_path, ALONE, TorchBackend(nn.Linear(4, 3), optimizer(lr=0.1)), found=saved, settings=now)
        assert kept.load(lambda state: None) == {"n": 0}
        assert caplog.messages == [
            "--actor.adam.lr was 1e-06 up to global_step1, and is 5e-07 from here on",
            "--eval.dataset was unset up to global_step1, and is held-out.jsonl from here on",
        ]

    def test_an_older_checkpoint_has_none(self, tmp_path):
        saved = TestWhatCannotBeContinued.saved(tmp_path, settings=THEN)
        del saved.state["settings"]
        assert saved.changes({"actor.adam.lr": 5e-7}) == []
