"""Images: one RL step of an image-text model, by phase, packed and one sample at a time.

    python -m bench.vision                     # on a GPU: Qwen2.5-VL with a decoder of 0.5B; on a CPU: a small one
    python -m bench.vision --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.vision --case "4 images"   # one of the cases

Random weights and random images of 448 × 448 pixels (256 features each), GRPO without KL, a rule reward, one update of
all samples; end-of-sequence is ignored. It is the real command otherwise, in a process of its own. The first step warms
up; the table has medians over the others.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.hybrid import LETTERS, PHASES, REWARD_FILE
from bench.results import write_section

STEPS = 3
CASES = {
    "1 image": (1, {"train.dynamic_batch_enable": "true"}),
    "4 images": (4, {"train.dynamic_batch_enable": "true"}),
    "1 image, a sample at a time": (1, {"train.micro_batch_size": 1, "rollout.micro_batch_size": 1}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a machine is given."""

    prompts: int
    samples: int
    new_tokens: int
    side: int
    """Of an image, in pixels."""
    budget: int
    """Tokens of a micro-batch."""
    dtype: str
    text: dict[str, Any]
    vision: dict[str, Any]
    engines: int

    @property
    def features(self) -> int:
        """Of an image."""
        return (self.side // self.vision["patch_size"] // 2) ** 2


ROPE = {"rope_type": "default", "rope_theta": 1e6}
GPU = Work(
    prompts=64,
    samples=8,
    new_tokens=256,
    side=448,
    budget=32768,
    dtype="bf16",
    text={
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rope_parameters": {**ROPE, "mrope_section": [8, 12, 12]},
    },
    vision={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 896,
    },
    engines=1,
)
CPU = Work(
    prompts=8,
    samples=4,
    new_tokens=16,
    side=56,
    budget=4096,
    dtype="fp32",
    text={
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {**ROPE, "mrope_section": [4, 6, 6]},
    },
    vision={
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 14,
        "fullatt_block_indexes": [1],
        "out_hidden_size": 64,
    },
    engines=0,
)


def write_inputs(folder: Path, work: Work, *, steps: int) -> None:
    """Model, tokenizer, image processor, images, prompts and reward file."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2Tokenizer,
        Qwen2VLImageProcessorPil,
    )

    special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    known = ["<pad>", "<eos>", *LETTERS, *special]
    words = [*known, *(f"t{i}" for i in range(len(known), work.text["vocab_size"]))]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=special,
    )
    start, end, image, video = tokenizer.convert_tokens_to_ids(special)
    config = Qwen2_5_VLConfig(
        text_config={"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": 1, **work.text},
        vision_config=work.vision,
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if work.dtype == "bf16" else torch.float32
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=work.vision["patch_size"]).save_pretrained(folder)
    pixels = np.random.default_rng(0)
    rng = random.Random(0)
    (folder / "images").mkdir()
    for i in range(work.prompts * steps * 4):
        noise = Image.fromarray(pixels.integers(0, 256, (14, 14, 3), dtype=np.uint8))
        noise.resize((work.side, work.side), Image.Resampling.NEAREST).save(folder / "images" / f"{i}.png")
    for count in {count for count, _ in CASES.values()}:
        records = []
        for i in range(work.prompts * steps):
            text = "<image>" * count + "".join(rng.choices(LETTERS, k=32))
            records.append({"input": text, "images": [f"images/{4 * i + k}.png" for k in range(count)]})
        (folder / f"prompts-{count}.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "reward.py").write_text(REWARD_FILE)


def run(folder: Path, work: Work, *, case: str, steps: int) -> dict[str, Any]:
    """The run's own metrics, step by step."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs import rl_assembly

    chosen = rl_assembly.sampling_params  # no flag ignores end-of-sequence
    rl_assembly.sampling_params = lambda config, **options: chosen(config, **options).copy(ignore_eos=True)
    count, own = CASES[case]
    flags = {
        "actor.model_name_or_path": folder,
        "data.prompt_dataset": folder / f"prompts-{count}.jsonl",
        "data.max_images_per_prompt": count,
        "data.max_len": 64 + count * work.features + work.new_tokens,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": work.prompts,
        "rollout.n_samples_per_prompt": work.samples,
        "rollout.max_new_tokens": work.new_tokens,
        "train.batch_size": work.prompts * work.samples,
        "train.max_tokens_per_gpu": work.budget,
        "train.total_steps": steps,
        "train.colocate_all": "true",
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": work.engines,
        "vllm.enable_prefix_caching": "true",
        "vllm.gpu_memory_utilization": 0.35,
        "vllm.enable_sleep": "false",
        "ds.param_dtype": work.dtype,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / f"run-{time.time_ns()}",
        **own,
    }
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    result = rl_assembly.train(parse("train_ppo_ray", argv))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    columns = {name: f"timing/{phase}" for name, phase in PHASES.items()} | {"total": "timing/step_total"}
    columns |= {"length": "total_length"}
    columns |= {f"{phase}_gb": f"memory/peak_{phase}_gb" for phase in ("generation", "training")}
    return {name: [record.get(metric, 0.0) for record in records] for name, metric in columns.items()}


def table(results: dict[str, dict[str, Any]], work: Work) -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    parameters = "a decoder of 0.5B and the tower of Qwen2.5-VL" if work is GPU else "a small model"
    lines = [
        f"{device}, {parameters}, {work.dtype}; {work.prompts} × {work.samples} samples, images of {work.side}² "
        f"({work.features} features each), {work.new_tokens} new tokens. Seconds of a step; tokens/s count all tokens "
        "of all samples. `python -m bench.vision --write`.",
        "",
        "| prompt | generation | scoring | update | push | step | tokens/s | GB generating | GB training |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case, found in results.items():
        medians = {name: statistics.median(values[1:]) for name, values in found.items()}
        tokens = work.prompts * work.samples * medians["length"] / medians["total"]
        phases = [f"{medians[name]:.2f}" for name in (*PHASES, "total")]
        memory = [f"{medians[f'{phase}_gb']:.1f}" for phase in ("generation", "training")]
        lines.append(f"| {case} | {' | '.join(phases)} | {tokens:,.0f} | {' | '.join(memory)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; all, unless given")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()

    import torch

    work = GPU if torch.cuda.is_available() else CPU
    if options.side:
        found = run(options.folder, work, case=options.side, steps=options.steps)
        # A file: vLLM's processes write to standard output as they like.
        (options.keep / f"{options.side}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.keep = (options.keep or folder).resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
        write_inputs(folder, work, steps=options.steps)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        results = {}
        for case in options.case or CASES:
            file = options.keep / f"{case}.json"
            if not file.exists():
                command = [sys.executable, "-m", "bench.vision", "--side", case, "--folder", str(folder)]
                command += ["--keep", str(options.keep), "--steps", str(options.steps)]
                subprocess.run(command, check=True, stdout=sys.stderr)
            results[case] = json.loads(file.read_text())
            print(case, json.dumps(results[case]), file=sys.stderr, flush=True)
    body = table(results, work)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Images", body=body)


if __name__ == "__main__":
    main()
