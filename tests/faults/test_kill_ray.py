"""Five runs on Ray, each with its driver killed with SIGKILL once: nothing of it is left behind, and the same command
again trains on every sample once."""

import signal

import pytest
from killed_ray_runs import RayRl
from killed_runs import GONE_WITHIN, Straights, Try, assert_nothing_lost_or_repeated, attempt
from processes import wait_until

TRIES = [
    *(Try("sync", share) for share in (0.1, 0.5, 0.9)),
    Try("async", 0.3),
    Try("partial", 0.7),
]


class OneForAll(Straights):
    """What is trained on is the same in every pipeline, and starting takes most of the time."""

    def of(self, attempt):
        return super().of(TRIES[0])


@pytest.fixture(scope="module")
def straights(files, tmp_path_factory):
    return OneForAll(files, tmp_path_factory.mktemp("straight"), RayRl)


@pytest.mark.slow
@pytest.mark.parametrize("one", TRIES, ids=str)
def test_killed_and_started_again_nothing_is_lost_or_repeated(straights, results, tmp_path, one):
    happened = attempt(one, straights, tmp_path / "run")
    outcome = "nothing left behind, every sample once"
    results.add(f"The driver of a run on Ray, kill -9 ({one.pipeline})", **{"try": str(one)}, **happened.row(outcome))


@pytest.mark.slow
def test_a_driver_that_is_told_to_stop_saves_and_leaves_nothing(straights, results, tmp_path):
    run = RayRl(straights.inputs, tmp_path / "run")
    stopped = run.kill_when(lambda: len(run.ledger) >= 3, number=signal.SIGTERM)
    assert stopped.status == 128 + signal.SIGTERM, run.said
    before, found = len(run.ledger), run.latest
    assert found == f"global_step{before}"
    assert "stopped by SIGTERM and saved" in run.said
    assert wait_until(lambda: not run.left, GONE_WITHIN), run.left
    run.run()
    assert_nothing_lost_or_repeated(run, straights.of(TRIES[0])[0])
    row = {"try": "SIGTERM after round 3", "rounds": before, "went on from": found, "outcome": "every sample once"}
    results.add("The driver of a run on Ray, SIGTERM", **row)
