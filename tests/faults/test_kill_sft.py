"""Ten runs of SFT, each killed with SIGKILL once and started again: final weights and metrics as if nothing had been.

Minutes: `make test-faults`, not part of `make test`.
"""

import pytest
from killed_runs import SAVE_STEPS, Sft, assert_same_end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "step"),
    [
        ("logged", 1),
        ("writing", SAVE_STEPS),
        ("logged", 5),
        ("logged", 9),
        ("writing", 3 * SAVE_STEPS),
        ("logged", 13),
        ("logged", 18),
        ("logged", 24),
        ("writing", 7 * SAVE_STEPS),
        ("logged", 31),
    ],
)
def test_killed_and_started_again_it_ends_the_same(files, straight, results, tmp_path, at, step):
    run = Sft(files, tmp_path)
    run.kill(at, step)
    found = run.latest
    run.run()
    assert_same_end(run, straight)
    row = {"try": f"step {step} {at}", "went on from": found, "outcome": "equal weights and metrics"}
    results.add("SFT in one process, kill -9", **row)
