"""RL runs in one process, each killed with SIGKILL once and started again: no sample is lost, none trained on twice.

Sync runs end with the same weights, to the bit. Minutes: `make test-faults`; two of each kind are part of `make test`.
"""

import pytest
from killed_runs import Straights, Try, attempt


def evenly(count: int) -> list[float]:
    """Shares of a run's wall time, in the middle of as many equal parts."""
    return [(i + 0.5) / count for i in range(count)]


SYNC = [
    *(Try("sync", share) for share in evenly(18)),
    Try("sync", "sync_tree"),
    Try("sync", "rename"),
    Try("sync", 0.5, filtered=True),
]
ASYNC = [
    *(Try("async", share) for share in evenly(5)),
    *(Try("partial", share) for share in evenly(5)),
    Try("async", 0.5, filtered=True),
    Try("partial", 0.7, filtered=True),
]


@pytest.fixture(scope="module")
def straights(files, tmp_path_factory):
    return Straights(files, tmp_path_factory.mktemp("straight"))


@pytest.mark.slow
@pytest.mark.parametrize("one", SYNC + ASYNC, ids=str)
def test_killed_and_started_again_nothing_is_lost_or_repeated(straights, results, tmp_path, one):
    happened = attempt(one, straights, tmp_path / "run")
    outcome = "every sample once" + (", equal weights" if one.pipeline == "sync" else "")
    results.add(f"The driver of a local run, kill -9 ({one.kind})", **{"try": str(one)}, **happened.row(outcome))
