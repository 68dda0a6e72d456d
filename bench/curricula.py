"""How many samples a run needs with and without a curriculum, where few of the prompts teach anything.

    python bench/curricula.py FOLDER [--seeds 3] [--curricula off success …]

The demo's task and model: put five digits in order. Of 500 training prompts 100 are right for the model, 200 accept
every answer, and 200 accept none. Measured is when the success on other problems, evaluated every 5 rounds of 32
prompts with 8 samples each, first reaches 0.5, 0.8 and 0.9.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

PROMPTS, RIGHT, EASY = 500, 100, 200
BATCH, SAMPLES, EVERY = 32, 8, 5
SCORES = (0.5, 0.8, 0.9)
REWARD = '''"""A prompt's label is the answer, or says that every answer is right, or none."""


def reward_func(queries, prompts, labels):
    answers = [query[len(prompt) :].removesuffix("<eos>") for query, prompt in zip(queries, prompts)]
    rewards = [float(label == "any" or answer == label) for answer, label in zip(answers, labels)]
    return {"rewards": rewards, "scores": rewards}
'''


def write(folder: Path, *, seed: int) -> None:
    """Model and data of one seed, the same for every curriculum."""
    from openrlhf.cli.demo import prepare
    from openrlhf.demo.sorting import make_task

    task = make_task(seed=seed, train=PROMPTS, held_out=200)
    prepare(task, folder, seed=seed)
    rng = random.Random(seed)
    kinds = ["right"] * RIGHT + ["any"] * EASY + ["none"] * (PROMPTS - RIGHT - EASY)
    rng.shuffle(kinds)
    records = [
        {"input": problem.prompt, "label": problem.label if kind == "right" else kind, "datasource": kind}
        for problem, kind in zip(task.train, kinds, strict=True)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(REWARD)


def run(inputs: Path, folder: Path, *, curriculum: str, seed: int, steps: int, more: list[str]) -> dict[float, int]:
    """The samples after which each of `SCORES` is reached."""
    flags = {
        "actor.model_name_or_path": inputs / "model",
        "data.prompt_dataset": inputs / "train.jsonl",
        "data.label_key": "label",
        "data.max_len": 16,
        "data.curriculum": curriculum,
        "reward.remote_url": inputs / "reward.py",
        "rollout.max_new_tokens": 6,
        "rollout.batch_size": BATCH,
        "rollout.n_samples_per_prompt": SAMPLES,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0,
        "actor.adam.lr": 1e-4,
        "train.batch_size": BATCH * SAMPLES,
        "train.dynamic_batch_enable": "true",
        "train.num_episodes": 1 + steps * BATCH // PROMPTS,
        "train.total_steps": steps,
        "train.seed": seed,
        "eval.dataset": inputs / "held_out.jsonl",
        "eval.n_samples_per_prompt": 1,
        "eval.steps": EVERY,
        "ckpt.output_dir": folder / "model",
        "logger.run_dir": folder,
        "vllm.num_engines": 0,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    log = folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        command = [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words, *more]
        subprocess.run(command, stdout=out, stderr=out, check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    scores = [(line["global_step"], line["eval_sorting_pass1"]) for line in lines if "eval_sorting_pass1" in line]
    reached = {}
    for wanted in SCORES:
        step = next((step for step, score in scores if score >= wanted), None)
        if step is not None:
            reached[wanted] = step * BATCH * SAMPLES
    return reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--curricula", nargs="+", default=["off", "success"])
    given, more = parser.parse_known_args()
    for seed in range(given.seeds):
        inputs = given.folder / f"seed{seed}" / "inputs"
        inputs.mkdir(parents=True, exist_ok=True)
        write(inputs, seed=seed)
        for curriculum in given.curricula:
            reached = run(
                inputs, inputs.parent / curriculum, curriculum=curriculum, seed=seed, steps=given.steps, more=more
            )
            shown = "  ".join(f"{score:g}: {reached.get(score, 'never')}" for score in SCORES)
            print(f"seed {seed}  {curriculum:12}  samples until {shown}", flush=True)


if __name__ == "__main__":
    main()
