"""A mixture of experts: the gap between engine and trainer with and without replayed routes, and a step by phase.

    python -m bench.experts                     # on a GPU: 6.6B parameters, 1.3B of them active; on a CPU: a small one
    python -m bench.experts --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.experts --part kernels      # one of the parts
    python -m bench.experts --engine embedded   # without vLLM
    python -m bench.experts --keep F            # results in a folder; those that are there are not measured again

`run` is the real command in a process of its own: random weights in Qwen3-MoE's shape, GRPO without KL, a rule reward,
two updates a round, so that there are old log-probs; end-of-sequence is ignored. vLLM sleeps while the policy is
trained. It has four rounds. Routers with random weights choose by logits that hardly differ; those of trained models
know what they want. After the second round the routers' weights are therefore multiplied by `--sharpness`, in the
trainer, and the push brings them to the engine. In each round the first samples are read twice by the trainer, before
anything else is done with them: through the engine's experts, and through the experts that its own routers choose. Both
are compared with the engine's log-probs, on the same tokens. The last round is trained without routes, for the time
that replay costs.

`kernels` is a forward and backward of one pack of tokens, through each implementation of the experts.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.hybrid import PHASES, vllm_version, write_inputs
from bench.results import write_section

ROUNDS = ("first, warming up", "random routers", "sharp routers", "sharp routers, trained without replay")
KERNELS = ("grouped_mm", "batched_mm", "deepgemm", "eager")
REPLAYED = f"{KERNELS[0]}, replayed"
PARTS = ("run", "kernels")
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a machine is given."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    budget: int
    """Tokens of a micro-batch, and of the pack that kernels are measured with."""
    compared: int
    """Samples of a round whose log-probs are compared."""
    dtype: str
    hidden: int
    intermediate: int
    """Of an expert."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    per_token: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * (self.prompt_tokens + self.new_tokens)

    def parameters(self, *, active: bool = False) -> int:
        """All of them; or those that compute a token. Norms apart, which are few."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        experts = (self.per_token if active else self.experts) * 3 * self.hidden * self.intermediate
        layer = attention + experts + self.experts * self.hidden
        return self.layers * layer + self.vocabulary * self.hidden

    def config(self) -> Any:
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            moe_intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_experts=self.experts,
            num_experts_per_tok=self.per_token,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            max_position_embeddings=32_768,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )


GPU = Work(
    prompts=64, samples=8, prompt_tokens=256, new_tokens=512, budget=16_384, compared=64, dtype="bf16",
    hidden=2048, intermediate=768, layers=20, heads=16, kv_heads=4, head_dim=128, experts=64, per_token=8,
    vocabulary=151_936,
)  # fmt: skip
"""In GiB: weights 12.2, masters and moments 73, gradients 24, which makes 110 beside activations of some 5 with
checkpointing. While it samples, vLLM has 12.2 of weights and 15 of keys and values beside 86 of the trainer's."""
CPU = Work(
    prompts=16, samples=4, prompt_tokens=12, new_tokens=12, budget=256, compared=8, dtype="bf16",
    hidden=64, intermediate=32, layers=2, heads=2, kv_heads=1, head_dim=32, experts=8, per_token=2, vocabulary=256,
)  # fmt: skip


class Rounds:
    """Looks at every round of a run before it is scored, and changes what the rounds after it meet."""

    def __init__(self, work: Work, *, sharpness: float) -> None:
        self._work = work
        self._sharpness = sharpness
        self._round = 0
        self.found: list[dict[str, float]] = []
        self.seconds: list[float] = []
        """That comparing took, which is none of the run's time."""

    def watch(self) -> None:
        from openrlhf.learners.rank import RankLearners

        place, update = RankLearners.place, RankLearners.update

        def placed(learners: Any, groups: Any) -> Any:
            made = place(learners, groups)
            start = time.perf_counter()
            self.found.append(compare(learners._policy_scorer._module, self._comparable(made.batch.samples)))
            self.seconds.append(time.perf_counter() - start)
            if self._round == len(ROUNDS) - 1:
                made.batch.samples[:] = [_without_routes(sample) for sample in made.batch.samples]
            return made

        def updated(learners: Any, batch: Any) -> Any:
            metrics = update(learners, batch)
            if self._round == 1:
                sharpen(learners._policy._backend, self._sharpness)
            self._round += 1
            return metrics

        RankLearners.place, RankLearners.update = placed, updated

    def _comparable(self, samples: Any) -> Any:
        """A run asks vLLM for the log-probs of some prompts only, where nothing but metrics needs them."""
        known = [sample for sample in samples if sample.segment.rollout_logprobs is not None]
        return known[: self._work.compared]


def _without_routes(sample: Any) -> Any:
    return dataclasses.replace(sample, segment=dataclasses.replace(sample.segment, routes=None))


def sharpen(backend: Any, factor: float) -> None:
    """Routers choose the same experts, far more decidedly."""
    import torch

    with torch.no_grad():
        for name, master in backend._masters.items():
            if name.endswith("mlp.gate.weight"):
                master.mul_(factor)
    backend._round_into_module()
    backend._guard.remember()


def compare(policy: Any, samples: Any) -> dict[str, float]:
    """The engine's log-probs and experts beside the trainer's, with the engine's experts and with its own.

    `differing_choices` is a share of all choices (a token's experts in a layer, in whatever order), `differing_tokens`
    of the tokens, which differ when they do in any layer. `differing_replayed` is a share of choices too: of those that
    routers would have made while the engine's are replayed below them.
    """
    import torch

    from openrlhf.models.routes import RouteLog
    from openrlhf.types import PackedTokens

    device = next(policy.parameters()).device
    gaps: dict[str, list[Any]] = {"with": [], "without": []}
    choices, tokens_differ = [], []
    log = RouteLog(policy.routers.shape, device)
    policy.eval()
    for start in range(0, len(samples), 16):
        segments = [sample.segment for sample in samples[start : start + 16]]
        if any(segment.routes is None for segment in segments):
            raise RuntimeError("the engine has told no routes")
        # No shared prompts: the rows of the forward are then the tokens as they stand here.
        packed = dataclasses.replace(PackedTokens.from_segments(segments), shared_prefixes=()).to(device)
        engine_A = torch.cat([s.rollout_logprobs[s.action_mask] for s in segments])
        with torch.no_grad():
            replayed_A = policy(packed, temperature=1.0, route_log=log).logprobs_A
            with chosen_experts(policy) as chosen:
                own_A = policy(packed.without_routes(), temperature=1.0).logprobs_A
        for kind, logprobs_A in (("with", replayed_A), ("without", own_A)):
            gaps[kind].append((logprobs_A.float().cpu() - engine_A).abs())
        chosen_TLK = torch.stack(chosen, dim=1).to(torch.int16)
        known_T = (packed.routes_TLK >= 0).all(dim=(1, 2))
        differs_TL = (chosen_TLK.sort(-1).values != packed.routes_TLK.sort(-1).values).any(-1)[known_T]
        choices.append(differs_TL.float().mean(1).cpu())
        tokens_differ.append(differs_TL.any(1).float().cpu())
    found = {f"gap_{kind}": float(torch.cat(parts).mean()) for kind, parts in gaps.items()}
    found |= {f"worst_{kind}": float(torch.cat(parts).max()) for kind, parts in gaps.items()}
    differing = {"choices": choices, "tokens": tokens_differ}
    found |= {f"differing_{name}": float(torch.cat(parts).mean()) for name, parts in differing.items()}
    return found | {
        "differing_replayed": float(log.differing_L.sum() / log.compared_L.sum()),
        "samples": len(samples),
    }


@contextlib.contextmanager
def chosen_experts(policy: Any) -> Iterator[list[Any]]:
    """Filled with the experts [T, K] of each layer in a forward of a mixture that has some in every layer."""
    from openrlhf.models.routes import Router

    chosen: list[Any] = []
    routers = [module for module in policy.modules() if isinstance(module, Router)]
    hooks = [
        router.register_forward_hook(lambda router, inputs, output: chosen.append(output[2])) for router in routers
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def run(folder: Path, work: Work, *, engine: str, sharpness: float, kernel: str | None) -> dict[str, Any]:
    """The run's own metrics, round by round, and what was found by comparing."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs import rl_assembly

    chosen = rl_assembly.sampling_params  # no flag ignores end-of-sequence
    rl_assembly.sampling_params = lambda config, **options: chosen(config, **options).copy(ignore_eos=True)
    rl_assembly._export = lambda *arguments: []  # half a minute for a model that nobody wants
    rounds = Rounds(work, sharpness=sharpness)
    rounds.watch()
    flags = {
        "actor.model_name_or_path": folder,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.max_samples": work.prompts * len(ROUNDS),
        "data.max_len": work.prompt_tokens + work.new_tokens,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "algo.router_replay": "true",
        "rollout.batch_size": work.prompts,
        "rollout.n_samples_per_prompt": work.samples,
        "rollout.max_new_tokens": work.new_tokens,
        "train.batch_size": work.prompts * work.samples // 2,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": work.budget,
        "rollout.max_tokens_per_gpu": work.budget,
        "train.launcher": "local",
        "train.colocate_all": "true",
        "actor.gradient_checkpointing_enable": "true",
        "actor.lr_scheduler": "constant",
        "actor.adam.lr": 1e-6,
        "vllm.num_engines": 1 if engine == "vllm" else 0,
        "vllm.enable_prefix_caching": "true",
        "vllm.gpu_memory_utilization": 0.25,
        "vllm.enable_sleep": "true",
        "ds.param_dtype": work.dtype,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / f"run-{time.time_ns()}",
    }
    if kernel:
        flags["ds.experts_implementation"] = kernel
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    result = rl_assembly.train(parse("train_ppo_ray", argv))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    columns = {name: f"timing/{phase}" for name, phase in PHASES.items()} | {"total": "timing/step_total"}
    columns |= {f"{phase}_gb": f"memory/peak_{phase}_gb" for phase in ("generation", "training")}
    columns |= {
        name: name for name in sorted(records[0]) if name.startswith("experts/") or name in ("logprobs_diff", "vllm_kl")
    }
    timed = {name: [record.get(metric, 0.0) for record in records] for name, metric in columns.items()}
    for name in ("score", "total"):
        timed[name] = [all_of - own for all_of, own in zip(timed[name], rounds.seconds, strict=True)]
    return timed | {name: [found[name] for found in rounds.found] for name in rounds.found[0]}


def measure_kernels(work: Work) -> dict[str, Any]:
    """Seconds of a forward and backward of one pack, and the most memory it took; why not, where it does not run.

    Also with routes that are replayed, through the first kernel.
    """
    import torch
    from transformers import Qwen3MoeForCausalLM

    from openrlhf.models.attention import ATTENTION
    from openrlhf.models.body import decoder_layers
    from openrlhf.models.policy import Policy
    from openrlhf.models.routes import install_routers
    from openrlhf.types import PackedTokens

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if work.dtype == "bf16" else torch.float32
    torch.manual_seed(0)
    with device:
        model = Qwen3MoeForCausalLM._from_config(work.config(), dtype=dtype)
    model.set_attn_implementation(ATTENTION)
    routers = install_routers(model, decoder_layers(model), replay=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model, routers=routers).train()
    length = work.prompt_tokens + work.new_tokens
    count = work.budget // length
    ids = [torch.randint(2, work.vocabulary, (length,)) for _ in range(count)]
    actions = [torch.arange(length) >= work.prompt_tokens for _ in range(count)]
    scores_TLE = torch.rand(count * length, work.layers, work.experts)
    routes_TLK = scores_TLE.topk(work.per_token).indices.to(torch.uint8)
    routed = PackedTokens.from_sequences(ids, actions, routes=routes_TLK.split(length)).to(device)
    found: dict[str, Any] = {"tokens": routed.num_tokens}
    for kernel in KERNELS:
        found[kernel] = _kernel_seconds(policy, kernel, routed.without_routes())
    found[REPLAYED] = _kernel_seconds(policy, KERNELS[0], routed)
    return found


def _kernel_seconds(policy: Any, kernel: str, tokens: Any) -> dict[str, Any]:
    import torch

    gpu, seconds = torch.cuda.is_available(), []
    try:
        policy.model.set_experts_implementation(kernel)
        for _ in range(3):
            if gpu:
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.synchronize()
            start = time.perf_counter()
            policy(tokens, temperature=1.0).logprobs_A.mean().backward()
            if gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            policy.zero_grad()
        return {"seconds": min(seconds[1:]), "peak_gb": torch.cuda.max_memory_allocated() / GIB if gpu else 0.0}
    except torch.OutOfMemoryError:
        return {"why": "does not fit"}
    except Exception as error:  # a kernel that is not installed, or not made for this device
        return {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    finally:
        policy.zero_grad()
        if gpu:
            torch.cuda.empty_cache()


def table(results: dict[str, dict[str, Any]], work: Work, *, engine: str, sharpness: float) -> str:
    from importlib.metadata import version

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    sampled = f"vLLM {vllm_version(version)}" if engine == "vllm" else "the embedded engine"
    lines = [
        f"Qwen3-MoE's shape, {work.hidden} × {work.layers}, {work.experts} experts of {work.intermediate}, "
        f"{work.per_token} of them for a token: {work.parameters() / 1e9:.2f}B parameters, "
        f"{work.parameters(active=True) / 1e9:.2f}B of them active. Random weights, {work.dtype}, {name}, torch "
        f"{torch.__version__}, {sampled}, one process. {work.prompts} prompts × {work.samples} samples, "
        f"{work.prompt_tokens} + {work.new_tokens} tokens, two updates. Sharp routers: their weights × {sharpness:g}. "
        "Repeat: `python -m bench.experts --write`."
    ]
    if found := results.get("run"):
        lines += [
            "",
            f"Log-probs of engine and trainer over {found['samples'][0]} samples each: mean and largest distance.",
            "",
            "| round | mean, own experts | mean, replayed | largest, own | largest, replayed | choices that differ | "
            "tokens with such a choice | choices that would differ, replayed |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for i, title in enumerate(ROUNDS[:-1]):
            gaps = [found[f"{what}_{kind}"][i] for what in ("gap", "worst") for kind in ("without", "with")]
            shares = [found[f"differing_{what}"][i] for what in ("choices", "tokens", "replayed")]
            cells = [*(f"{gap:.1e}" for gap in gaps), *(f"{share:.2%}" for share in shares)]
            lines.append(f"| {title} | {' | '.join(cells)} |")
        lines += [
            "",
            "Seconds of a round; scoring is that of the old log-probs.",
            "",
            "| round | generation | scoring | update | push | total | tokens/s | GiB sampling / training |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for i, title in enumerate(ROUNDS):
            phases = [f"{found[phase][i]:.2f}" for phase in (*PHASES, "total")]
            memory = " / ".join(f"{found[f'{phase}_gb'][i]:.0f}" for phase in ("generation", "training"))
            lines.append(f"| {title} | {' | '.join(phases)} | {work.tokens / found['total'][i]:,.0f} | {memory} |")
    if found := results.get("kernels"):
        lines += [
            "",
            f"A forward and backward of {found['tokens']:,} tokens, with gradient checkpointing, by "
            "`--ds.experts_implementation`.",
            "",
            "| kernel | seconds | tokens/s | GiB |",
            "|---|---|---|---|",
        ]
        for kernel in (*KERNELS, REPLAYED):
            one = found[kernel]
            if "why" in one:
                lines.append(f"| `{kernel}` | {one['why']} | | |")
            else:
                rate = found["tokens"] / one["seconds"]
                lines.append(f"| `{kernel}` | {one['seconds']:.2f} | {rate:,.0f} | {one['peak_gb']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--part", choices=PARTS, action="append", help="one of them; all, unless given")
    parser.add_argument("--engine", choices=("vllm", "embedded"), default="vllm")
    parser.add_argument("--sharpness", type=float, default=10.0)
    parser.add_argument(
        "--kernel", choices=KERNELS, help="--ds.experts_implementation of the run; unless given, its own"
    )
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()

    import torch

    work = GPU if torch.cuda.is_available() else CPU
    if options.side:
        if options.side == "inputs":
            write_inputs(options.folder, work, steps=len(ROUNDS))
            return
        if options.side == "kernels":
            os.environ["HF_HUB_OFFLINE"] = "1"  # a kernel that would have to be fetched is told at once
            found = measure_kernels(work)
        else:
            found = run(options.folder, work, engine=options.engine, sharpness=options.sharpness, kernel=options.kernel)
        # A file: vLLM's processes write to standard output as they like.
        (options.keep / f"{options.side}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.keep = (options.keep or folder).resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
        results = {part: _measured(part, folder, options) for part in options.part or PARTS}
    body = table(results, work, engine=options.engine, sharpness=options.sharpness)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Mixtures of experts", body=body)


def _measured(part: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In processes of their own, which give the device's memory back when they end; unless the result is there."""
    result = options.keep / f"{part}.json"
    if not result.exists():
        for side in ("inputs", "run") if part == "run" else (part,):
            start = time.perf_counter()
            command = [sys.executable, "-m", "bench.experts", "--side", side, "--folder", str(folder)]
            command += ["--keep", str(options.keep), "--engine", options.engine, "--sharpness", str(options.sharpness)]
            command += ["--kernel", options.kernel] if options.kernel else []
            subprocess.run(command, check=True, stdout=sys.stderr)
            print(f"{side}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    found = json.loads(result.read_text())
    print(part, json.dumps(found), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
