"""Async and partial rollout in one process: it learns, samples are as old as they may be, and no prompt is lost."""

import json
from collections import Counter

import pytest
from demo_runs import column, run, scores

pytestmark = pytest.mark.slow

ASYNC = ["--train.async_enable"]
PARTIAL = [*ASYNC, "--train.partial_rollout_enable"]
CORRECTED = ["--algo.advantage.is_correction_enable"]


@pytest.mark.parametrize(
    ("pipeline", "estimator"), [(ASYNC, "reinforce_baseline"), (PARTIAL, "rloo")], ids=["async", "partial"]
)
def test_the_demo_learns(demo, tmp_path, pipeline, estimator):
    words = [*pipeline, *CORRECTED, "--algo.advantage.estimator", estimator]
    run_dir = run(demo, tmp_path / "run", *words, steps=8)
    before, after = scores(run_dir)
    assert before <= 0.6
    assert after >= before + 0.1
    assert max(column(run_dir, "rollout/staleness_max")) == 1
    assert column(run_dir, "rollout/failed") == [0] * 8


def test_every_prompt_is_trained_on_once(inputs, tmp_path, cli):
    """Eight prompts, two samples each, in rounds of two, generation three rounds ahead."""
    ran = cli(
        *PARTIAL, train__async_queue_size=3, rollout__batch_size=2, train__batch_size=4, rollout__vllm_generate_batch_size=6
    )  # fmt: skip
    assert ran.rc == 0, ran.err
    lines = [json.loads(line) for line in (ran.run_dir / "rollouts.jsonl").read_text().splitlines()]
    assert Counter((line["prompt_ordinal"], line["sample"]) for line in lines) == {
        (prompt, sample): 1 for prompt in range(8) for sample in range(2)
    }
