"""DeepSpeed's universal checkpoints, in files laid out as its converter does it."""

import os
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from small_sections import optimizer
from torch import nn

from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.folder import CheckpointError, CheckpointFolder, Retention
from openrlhf.checkpoint.manager import Checkpointer, LocalCheckpointedModel, NoCheckpoints
from openrlhf.checkpoint.universal import UniversalStart, find_universal

SETTINGS = optimizer(lr=0.1)


class Wrapped(nn.Module):
    """A model below `model.`, as ours are."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 2)
        self.head = nn.Linear(2, 1, bias=False)
        self.head_prefix = "score"


def trained(steps: int) -> TorchBackend:
    torch.manual_seed(0)
    backend = TorchBackend(Wrapped(), SETTINGS)
    for _ in range(steps):
        backend.backward(sum((p**2).sum() for p in backend.module.parameters()))
        backend.step()
    return backend


def write(folder: Path, backend: TorchBackend, *, prefix: str = "", head: str = "score", flat: bool = False) -> Path:
    """`flat`: as of stage 3, without shapes and steps beside the tensors."""
    names = {"model.weight": f"{prefix}weight", "model.bias": f"{prefix}bias", "head.weight": f"{head}.weight"}
    tensors = dict(backend.tensor_state())
    for ours, theirs in names.items():
        place = folder / "global_step2_uni" / "zero" / theirs
        place.mkdir(parents=True)
        for kind, file in (("parameters", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            tensor = tensors[f"{kind}/{ours}"]
            torch.save(tensor.flatten() if flat else {"param": tensor, "cat_dim": 0}, place / f"{file}.pt")
        if not flat:
            torch.save(torch.tensor(2.0), place / "step.pt")
    shapes = {theirs: tensors[f"parameters/{ours}"].shape for ours, theirs in names.items()}
    states = {"global_steps": 3, "skipped_steps": 1, "param_shapes": [shapes] if flat else None}
    torch.save(states, folder / "global_step2_uni" / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text("global_step2_uni")
    return folder


def start(folder: Path, backend: TorchBackend, saver: Checkpointer) -> UniversalStart:
    model = LocalCheckpointedModel(backend, lambda *_: None, module=backend.module)
    return UniversalStart({folder: model}, saver, loop_state=lambda: {"steps": backend.scalar_state()["steps"]})


def begin(folder: Path, backend: TorchBackend) -> dict:
    return start(folder, backend, NoCheckpoints()).load(lambda state: None)


@pytest.mark.parametrize("flat", [False, True], ids=["stage 2", "stage 3"])
@pytest.mark.parametrize("prefix", ["", "model.", "module.", "module.model.", "model.model."])
def test_a_run_begins_with_its_weights_moments_and_steps(tmp_path, prefix, flat):
    """Three steps, one left out for an overflow: two were taken, whatever wraps the model there."""
    first, second = trained(steps=2), TorchBackend(Wrapped(), SETTINGS)
    assert begin(write(tmp_path, first, prefix=prefix, flat=flat), second) == {"steps": 2}
    expected, measured = dict(first.tensor_state()), dict(second.tensor_state())
    assert measured.keys() == expected.keys()
    assert all(torch.equal(measured[name], tensor) for name, tensor in expected.items())
    assert second.scalar_state() == first.scalar_state() == {"steps": 2}


def test_universal_start_saves_into_our_own_checkpoints(tmp_path):
    class Saver(NoCheckpoints):
        events: ClassVar[list] = []

        def save(self, step, state, *, best=False):
            self.events.append(("save", step, state, best))

        def keep_best(self, step):
            self.events.append(("keep_best", step))

    backend = trained(steps=2)
    begun = start(write(tmp_path, backend), backend, Saver())
    begun.save(3, {"steps": 3}, best=True)
    begun.keep_best(3)
    assert Saver.events == [("save", 3, {"steps": 3}, True), ("keep_best", 3)]


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    folder = write(tmp_path, trained(steps=2), head="value_head")
    with pytest.raises(CheckpointError, match=r"cannot be continued: the saved state has no head\.weight"):
        begin(folder, TorchBackend(Wrapped(), SETTINGS))


def test_names_that_could_be_the_same_are_refused(tmp_path):
    folder = write(tmp_path, trained(steps=2))
    zero = folder / "global_step2_uni" / "zero"
    (zero / "model.weight").mkdir()
    (zero / "model.weight" / "fp32.pt").write_bytes((zero / "weight" / "fp32.pt").read_bytes())
    with pytest.raises(CheckpointError, match="several parameters"):
        begin(folder, TorchBackend(Wrapped(), SETTINGS))


def test_universal_checkpoint_names_missing_files_and_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"latest_universal cannot be read; .* deepspeed\.checkpoint\.ds_to_univ"):
        find_universal(tmp_path)
    (tmp_path / "latest_universal").write_text("global_step2_uni")
    with pytest.raises(CheckpointError, match="is no universal checkpoint"):
        find_universal(tmp_path)


class Harmful:
    """Unpickled, it makes a folder."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_universal_checkpoint_runs_no_pickled_code(tmp_path):
    folder = write(tmp_path, trained(steps=2))
    file = folder / "global_step2_uni" / "mp_rank_00_model_states.pt"
    torch.save({"global_steps": 3, "more": Harmful(tmp_path / "harm")}, file)
    with pytest.raises(CheckpointError, match=r"mp_rank_00_model_states\.pt cannot be read"):
        find_universal(folder)
    assert not (tmp_path / "harm").exists()


def test_checkpoints_of_deepspeed_are_neither_read_nor_removed_nor_replaced(tmp_path):
    """Ours would have the same names: with room for one, four steps later only DeepSpeed's and the newest are left."""
    theirs = tmp_path / "global_step2"
    theirs.mkdir()
    (theirs / "mp_rank_00_model_states.pt").touch()
    folder = CheckpointFolder(tmp_path, Retention(max_num=1))
    assert folder.has_deepspeeds
    assert folder.newest_complete() is None
    for step in (3, 4):
        folder.begin(step)
        folder.commit(step)
    assert folder.steps == [4]
    assert theirs.is_dir()
    with pytest.raises(CheckpointError, match="was written by DeepSpeed and stays"):
        folder.begin(2)
