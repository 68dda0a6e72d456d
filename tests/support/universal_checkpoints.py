"""DeepSpeed's universal checkpoints: `rewritten` makes one of a checkpoint of ours. As a script this file writes
checkpoints of a few steps as DeepSpeed does, of stages 2 and 3, and converts them with its own tool.

    torchrun --nproc-per-node 2 universal_checkpoints.py MODEL FOLDER

FOLDER/zero<stage>/ then has global_step<N>, global_step<N>_uni and latest_universal; FOLDER/zero<stage>.safetensors
what `Backend.tensors` gives of the same moment.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_sections import loading, optimizer

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.checkpoint.training_state import read_training_state
from openrlhf.config.backend import BackendSection
from openrlhf.models.loading import load_policy
from openrlhf.types import PackedTokens

STEPS = 3
STAGES = (2, 3)


def rewritten(checkpoint: Path, folder: Path, *, rounds: int, prompts: int) -> Path:
    """The actor and critic of a checkpoint of ours, in the layout and under the names that RL runs of other frameworks
    have them; returns `folder`."""
    for part in (path.name for path in checkpoint.iterdir() if (path / "training_state").is_dir()):
        numbers, tensors = read_training_state(checkpoint / part / "training_state")
        target = folder / f"_{part}" / f"global_step{rounds}_uni"
        for name in tensors:
            kind, _, parameter = name.partition("/")
            place = target / "zero" / f"module.{parameter}".replace("module.head.", "score.")
            place.mkdir(parents=True, exist_ok=True)
            file = {"parameters": "fp32"}.get(kind, kind)
            torch.save(tensors[name] if kind == "step" else {"param": tensors[name]}, place / f"{file}.pt")
        client = {"episode": 0, "global_step": rounds, "total_consumed_prompts": prompts, "data_loader_state_dict": {}}
        states = {"global_steps": numbers["steps"], "skipped_steps": 0, **(client if part == "actor" else {})}
        torch.save(states, target / "mp_rank_00_model_states.pt")
        (folder / f"_{part}" / "latest_universal").write_text(target.name)
    return folder


def main(model: str, folder: Path) -> None:
    dist.init_process_group("gloo")
    for stage in STAGES:
        policy = load_policy(model, loading())
        backend = DeepSpeedBackend(policy, optimizer(lr=1e-3), BackendSection(zero_stage=stage))
        for step in range(STEPS):
            ids = torch.arange(8) + step
            tokens = PackedTokens.from_sequences([ids], [torch.arange(8) > 0])
            backend.backward(-backend.module(tokens, temperature=1.0).logprobs_A.mean())
            backend.step()
        target = folder / f"zero{stage}"
        backend.module.save_checkpoint(str(target), tag=f"global_step{STEPS}")
        tensors = {name: tensor.clone() for name, tensor in backend.tensor_state()}
        if dist.get_rank() == 0:
            save_file(tensors, folder / f"zero{stage}.safetensors")
            convert(target)
        dist.barrier()
    dist.destroy_process_group()


def convert(folder: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main as ds_to_universal

    source = folder / f"global_step{STEPS}"
    ds_to_universal(
        argparse.Namespace(
            input_folder=str(source),
            output_folder=f"{source}_uni",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


if __name__ == "__main__":
    require_deepspeed()
    main(sys.argv[1], Path(sys.argv[2]))
