"""Five runs on Ray, each with its driver killed with SIGKILL once: nothing of it is left behind, and the same command
again trains on every sample once."""

import pytest
from killed_ray_runs import RayRl
from killed_runs import Straights, Try, attempt

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
    results.add("The driver of a run on Ray, kill -9", **{"try": str(one)}, **happened.row(outcome))
