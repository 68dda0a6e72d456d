"""`openrlhf eval MODEL`: pass@k and mean scores of a model on prompts, judged by a reward or played by an agent."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.config.aliases import Given, vocabulary
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import USAGE_ERROR, configure, settings_in
from openrlhf.utils import interrupts
from openrlhf.worlds.environments import is_world

COMMAND = "train_ppo_ray"
"""The command whose flags about prompts, rewards, sampling and engines hold here too."""
TAKEN = frozenset(
    {
        *(f"rollout.{name}" for name in ("max_new_tokens", "top_p", "top_k", "stop", "agent_hosts", "step_timeout")),
        *(f"reward.{name}" for name in ("timeout", "api_key", "weights", "normalize_enable")),
        *(f"vllm.{name}" for name in ("tensor_parallel_size", "pipeline_parallel_size", "gpu_memory_utilization")),
        *(f"vllm.{name}" for name in ("enforce_eager", "logits_dtype", "enable_prefix_caching", "quantization")),
        *(f"world.{name}" for name in ("tasks", "options", "eval_samples", "python", "processes", "timeout")),
        *("max_steps", "train.seed", "actor.trust_remote_code", "ds.param_dtype", "ds.attn_implementation"),
    }
)
"""Its flags that have an effect here, beside all about data."""
OF_CURRICULA = ("data.curriculum", "data.difficulty_key")
OWN = {
    "data.prompt_dataset": "--data",
    "data.max_samples": "--limit",
    "reward.remote_url": "--reward",
    "rollout.n_samples_per_prompt": "--n",
    "eval.temperature": "--temperature",
    "rollout.temperature": "--temperature",
    "vllm.num_engines": "--engine",
}
"""Flags that have a word of their own here."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: measured; 1: something is wrong with the model, the data or the reward, or no sample was judged; 2: usage."""
    parser = _parser()
    given, rest = parser.parse_known_args(argv)
    with interrupts.handled():
        try:
            settings = _settings(given, rest)
            config = configure(COMMAND, settings, name="openrlhf eval", notes=False)
            from openrlhf.runs.measuring import EvalOptions, evaluate  # seconds of imports

            options = EvalOptions(
                model=given.model,
                n=given.n,
                ks=_ks(given.k, given.n),
                threshold=given.threshold,
                engine=_engine(given.engine, settings),
                output=given.output,
                save=given.save,
                sft=given.sft,
                pairs=given.pairs,
            )
            return evaluate(config, options)  # type: ignore[arg-type]
        except ConfigError as error:
            for line in str(error).splitlines():
                print(f"openrlhf eval: error: {line}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()


def _settings(given: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    """The configuration of a run that would play these prompts so. Raises ConfigError for a flag of training."""
    if not given.reward and not given.agent:
        raise ConfigError("what judges the samples? Give --reward (a .py file, a URL or a reward model) or --agent")
    if given.agent and (given.sft or given.pairs):
        asked = "--sft" if given.sft else "--pairs"
        raise ConfigError(f"{asked} makes records of a prompt and an answer, and --agent plays episodes: use --save")
    more = settings_in(COMMAND, rest, name="openrlhf eval")
    words = vocabulary(COMMAND)
    for name, raw in more.items():
        for path in words.sets(Given(name=name, raw=raw, where=f"--{name}")) or (name,):
            if path in OWN:
                raise ConfigError(f"--{name}: give {OWN[path]} here")
            if path.startswith(OF_CURRICULA) or (path not in TAKEN and not path.startswith("data.")):
                raise ConfigError(f"--{name} is about training, and changes nothing in an evaluation: leave it out")
    reward = given.reward or ""
    is_model = reward and not reward.endswith(".py") and "://" not in reward
    at_once = max(1, 512 // given.n)
    data = given.data or given.agent
    if data is None or (given.data is None and not is_world(data)):
        raise ConfigError("which prompts? Give --data (only a world has prompts of its own)")
    settings: dict[str, Any] = {
        "actor.model_name_or_path": given.model,
        "data.prompt_dataset": data,
        "rollout.n_samples_per_prompt": given.n,
        "rollout.batch_size": at_once,
        "train.batch_size": at_once * given.n,
        "eval.temperature": given.temperature,
        # What follows belongs to training, and is chosen so that nothing of it stands in the way.
        "algo.advantage.estimator": "reinforce",
        "algo.kl.init_coef": 0,
    }
    if is_world(data):  # the records that training never draws
        settings["eval.dataset"] = data
    if given.limit is not None:
        settings["data.max_samples"] = given.limit
    if reward:
        settings["reward.model_name_or_path" if is_model else "reward.remote_url"] = reward
    if given.agent:
        settings["train.agent_func_path"] = given.agent
    return settings | more


def _engine(asked: str, settings: Mapping[str, Any]) -> str:
    """As asked for; who gives a flag of vLLM wants vLLM."""
    flag = next((name for name in settings if name.startswith("vllm.")), None)
    if flag is not None and asked == "embedded":
        raise ConfigError(f"--{flag} is about vLLM, and --engine is embedded: leave one of them out")
    return "vllm" if flag is not None else asked


def _ks(asked: Sequence[int] | None, n: int) -> tuple[int, ...]:
    """As asked for; else 1, 2, 4, … and n."""
    if asked:
        if max(asked) > n:
            raise ConfigError(f"--k {max(asked)}: pass@k needs k samples of each prompt or more, and --n is {n}")
        return tuple(sorted(set(asked)))
    return tuple(sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n}))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf eval",
        usage="openrlhf eval MODEL --data DATA (--reward REWARD | --agent FILE.py) [OPTIONS]",
        description="Sample answers of a model, judge them as in training, and print pass@k and the mean score with "
        "95% confidence intervals. A sample is right where its score is 1. pass@k is the unbiased estimate of Chen et "
        "al. 2021; prompts are the independent draws of the intervals (Wilson's for pass@k, mean ± 1.96 standard "
        "errors for scores). A sample whose reward or agent failed is counted, shown, and in no other number.",
        epilog="Flags of openrlhf rl about data, rewards, sampling and engines hold here too, under all their names: "
        "--input_key, --label_key, --apply_chat_template, --max_len, --max_new_tokens, --top_p, --top_k, --seed, "
        "--reward.timeout, --world.tasks, --vllm.tensor_parallel_size, … (openrlhf rl --help all).",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub name of a model, folder of an adapter, or folder of a run")
    add(
        "--data",
        metavar="DATA",
        help="prompts: file, folder or Hub name, as --data.prompt_dataset; a world has its own",
    )
    add("--reward", metavar="REWARD", help="a .py file with reward_func, a reward server's URL, or a reward model")
    add("--agent", metavar="FILE.py", help="an agent file, or a world (openrlhf.worlds.NAME), which plays the episodes")
    add("--n", type=count, default=4, metavar="N", help="samples of each prompt (4)")
    add("--k", type=count, nargs="+", metavar="K", help="the k of pass@k (1, 2, 4, … up to N)")
    add(
        "--temperature",
        type=not_negative,
        default=0.6,
        metavar="T",
        help="0 is greedy (0.6, as in a run's evaluations)",
    )
    add("--limit", type=count, metavar="PROMPTS", help="only so many of the first prompts")
    add("--threshold", type=float, default=1.0, metavar="SCORE", help="from which score on a sample is right (1)")
    add(
        "--engine",
        choices=("auto", "embedded", "vllm"),
        default="auto",
        help="what samples; auto: vLLM where it is installed and there is a GPU, else this process",
    )
    add("-o", "--output", metavar="FILE", help="write results and every sample there, as JSON; - is stdout")
    add("--save", metavar="FILE.jsonl", help="write samples there as they are judged; the same command goes on with it")
    add(
        "--sft",
        metavar="FILE.jsonl",
        help="write the best answer of each prompt, from --threshold on, for openrlhf sft",
    )
    add("--pairs", metavar="FILE.jsonl", help="write the best and the worst answer of each prompt, for openrlhf dpo")
    return parser


def count(text: str) -> int:
    """The value of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def not_negative(text: str) -> float:
    """The value of an option that may be 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number >= 0, got {text!r}")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
