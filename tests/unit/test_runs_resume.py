"""Which errors a run is restarted after, how often, and from where."""

import pytest

from openrlhf.checkpoint.folder import CheckpointFolder, Retention
from openrlhf.checkpoint.training_state import write_state
from openrlhf.cluster.engines import EngineLostError
from openrlhf.cluster.launch import ClusterError
from openrlhf.cluster.workers import WorkerError
from openrlhf.config.reporting import RLCheckpointSection
from openrlhf.models.loading import ModelLoadError
from openrlhf.rewards.base import RewardGoneError
from openrlhf.rollout.base import EngineError
from openrlhf.runs.resume import LOOK_SECONDS, ROOM_SECONDS, Checkpoints, lost_part, with_restarts
from openrlhf.weight_sync.base import WeightSyncError

GONE = WorkerError("actor rank 1 on 10.0.0.7 is gone: killed")
SAVING = RLCheckpointSection(save_steps=1)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GONE, True),
        (WorkerError("failed", reason=RuntimeError("CUDA error: uncorrectable ECC error")), True),
        (caused(WeightSyncError("the push failed"), GONE), True),
        (caused(RewardGoneError("no reward"), GONE), True),
        (EngineLostError("vLLM engine 0: its node is gone"), True),
        (WorkerError("rank 0", reason=ModelLoadError("no such model")), False),
        (caused(WeightSyncError("the push failed"), WorkerError("e", reason=EngineError("no heads of 20"))), False),
        (EngineError("it has been replaced 3 times"), False),
        (ZeroDivisionError("a defect"), False),
    ],
)  # fmt: skip
def test_restart_counts_these_errors_as_a_lost_part(error, lost):
    assert (lost_part(error) is not None) is lost


class Run:
    """Attempts that end as told: an error is raised after so many checkpoints have been written."""

    def __init__(self, folder: CheckpointFolder | None, *ends: Exception | None):
        self.folder = folder
        self.ends = list(ends)
        self.began_with: list[str | None] = []
        self.slept: list[float] = []
        self.step = 0
        self.saves = True

    def attempt(self, checkpoints: Checkpoints) -> str:
        self.began_with.append(checkpoints.found and checkpoints.found.path.name)
        if self.folder is not None and self.saves:
            self.step += 1
            write_state(
                self.folder.begin(self.step), {"resumable": True, "notes": {}, "identity": {}, "random": [], "loop": {}}
            )
            self.folder.commit(self.step)
            (self.folder.draft(self.step + 1)).mkdir()  # a write that came to no end
        end = self.ends.pop(0)
        if end is not None:
            raise end
        return "trained"

    def to_the_end(self, section=SAVING, *, most=3) -> str:
        checkpoints = Checkpoints(self.folder, None)
        return with_restarts(self.attempt, checkpoints, section, most=most, sleep=self.slept.append)


@pytest.fixture
def folder(tmp_path):
    opened = CheckpointFolder(tmp_path / "checkpoints", Retention(max_num=3, max_gib=float("inf")))
    opened.open()
    yield opened
    opened.close()


def test_restart_goes_on_from_the_newest_checkpoint(folder, caplog):
    run = Run(folder, GONE, GONE, None)
    assert run.to_the_end() == "trained"
    assert run.began_with == [None, "global_step1", "global_step2"]
    lines = [record.message for record in caplog.records]
    assert f"{GONE} — the run goes on from {folder.path / 'global_step2'} (restart 2 of 3)" in lines
    assert not folder.draft(2).exists()


def test_before_the_first_checkpoint_it_begins_anew(folder, caplog):
    run = Run(folder, GONE, None)
    run.saves = False
    assert run.to_the_end() == "trained"
    assert run.began_with == [None, None]
    assert "begins anew" in caplog.text


@pytest.mark.parametrize("most", [0, 2])
def test_after_so_many_restarts_the_cause_ends_the_run(folder, caplog, most):
    run = Run(folder, *[GONE] * 5)
    with pytest.raises(WorkerError, match=r"rank 1 on .* is gone"):
        run.to_the_end(most=most)
    assert len(run.began_with) == most + 1
    assert f"--train.max_restarts {most}" in caplog.text


@pytest.mark.parametrize("section", [RLCheckpointSection(), RLCheckpointSection(save_steps=1, disable_ds=True)])
def test_a_run_without_checkpoints_to_go_on_from_ends(section, caplog):
    run = Run(None, GONE, None)
    with pytest.raises(WorkerError):
        run.to_the_end(section)
    assert "--ckpt.save_steps" in caplog.text


def test_a_restart_waits_for_room_and_a_start_does_not(folder):
    """A node that was lost may come back; a plan that never fitted is refused at once."""
    full = ClusterError("the run needs 2 devices and the cluster has 1")
    run = Run(folder, GONE, full, full, None)
    assert run.to_the_end(most=1) == "trained"
    assert run.slept == [LOOK_SECONDS, LOOK_SECONDS]

    never = Run(folder, GONE, *[full] * 100)
    with pytest.raises(ClusterError):
        never.to_the_end()
    assert sum(never.slept) == ROOM_SECONDS

    with pytest.raises(ClusterError):
        Run(folder, full, None).to_the_end()
