"""RL runs that are killed with SIGKILL and started again: two of each kind. `tests/faults` does it thirty times."""

import pytest
from killed_runs import Straights, Try, attempt


@pytest.fixture(scope="module")
def straights(files, tmp_path_factory):
    return Straights(files, tmp_path_factory.mktemp("straight"))


@pytest.mark.parametrize(
    "one",
    [Try("sync", 0.6), Try("sync", "rename"), Try("async", 0.6), Try("partial", 0.5, filtered=True)],
    ids=str,
)
def test_killed_and_started_again_nothing_is_lost_or_repeated(straights, tmp_path, one):
    attempt(one, straights, tmp_path / "run")
