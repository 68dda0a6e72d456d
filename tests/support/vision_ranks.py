"""Policies with images trained by two ranks, the second of which has text alone, or which share all streams; and their
weights, gathered.

    torchrun --nproc-per-node 2 vision_ranks.py FOLDER

FOLDER has the models by kind, and then a file per kind and way with the largest difference of each weight from what one
process with plain torch made of the same steps.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_sections import optimizer
from vision_models import image

from openrlhf.backends.base import Backend
from openrlhf.backends.deepspeed import Distribution, require_deepspeed, sharded_loading
from openrlhf.backends.ranks import join
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.backend import BackendSection
from openrlhf.config.models import ActorSection
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens

WAYS = {
    "zero 0": (BackendSection(zero_stage=0, param_dtype="fp32"), False),
    "zero 2": (BackendSection(zero_stage=2, param_dtype="fp32"), False),
    "zero 3": (BackendSection(zero_stage=3, param_dtype="fp32"), False),
    "zero 3, frozen tower": (BackendSection(zero_stage=3, param_dtype="fp32"), True),
    "zero 3, context 2": (BackendSection(zero_stage=3, param_dtype="fp32", ring_attn_size=2), False),
}


def load(folder: Path, zero: BackendSection, *, frozen: bool) -> Policy:
    section = ActorSection(freeze_visual_encoder=frozen)
    return load_policy(folder, LoadSettings(device="cpu", ds=zero, model=section, trains=True, images=True))


def streams(folder: Path) -> list[list[tuple[torch.Tensor, torch.Tensor, tuple]]]:
    """The sequences of each rank."""
    tokenizer = load_tokenizer(folder)
    processor = ImageProcessor.load(folder, tokenizer)
    assert processor is not None
    mark = tokenizer.apply_chat_template([{"role": "u", "content": [{"type": "image"}]}], tokenize=False)
    inputs = [processor.prepare(image(i, width=w, height=h)) for i, (w, h) in enumerate([(24, 16), (16, 32)])]
    texts = [[(f"{mark}cat{mark}dog", inputs), ("plain", [])], [("1+1=2", []), ("hello", [])]]
    found = []
    for rank in texts:
        expanded = [processor.expand(text, images) for text, images in rank]
        found.append([(torch.tensor(ids), torch.arange(len(ids)) >= len(ids) - 3, placed) for ids, placed in expanded])
    return found


def train(backend: Backend, sequences: list) -> None:
    tokens = PackedTokens.from_sequences(
        [ids for ids, _, _ in sequences],
        [mask for _, mask, _ in sequences],
        images=[placed for _, _, placed in sequences],
    )
    for _ in range(2):
        backend.backward(-backend.module(tokens, temperature=1.0).logprobs_A.sum() / 100)
        backend.step()


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    # A larger eps: signs of tiny gradients do not decide. And no clipping, which would hide a factor.
    settings = optimizer(lr=1e-2, eps=1e-3, max_norm=0.0)
    found = {}
    for model in sorted(path for path in folder.iterdir() if path.is_dir()):
        both = streams(model)
        for way, (zero, frozen) in WAYS.items():
            alone = load(model, zero, frozen=frozen)
            alone.blank = None
            train(TorchBackend(alone, settings), [*both[0], *both[1]])
            with sharded_loading(zero, dtype=torch.float32):
                policy = load(model, zero, frozen=frozen)
            ranks = join(ranks_per_share=zero.ranks_per_share)
            ours = Distribution(ranks, zero).train(policy, settings, total_steps=1)
            shares = [[*both[0], *both[1]]] if ranks.count == 1 else both
            train(ours, shares[ranks.index])
            expected = dict(alone.named_parameters())
            gaps = {name: float((whole - expected[name]).abs().max()) for name, whole in ours.whole_weights()}
            start = load(model, zero, frozen=frozen)
            moved = {name: float((p - expected[name]).abs().max()) for name, p in start.named_parameters()}
            found[f"{model.name}, {way}"] = {"gaps": gaps, "moved": moved}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))
