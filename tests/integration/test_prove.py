"""`openrlhf prove`: it finds the bugs that frameworks of this field really had, and nothing where there is none."""

import contextlib
import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from mutants import CannotApply, mutated
from own_weights import own_weights
from script_commands import SCRIPTS, started_by
from vision_models import image, write_vision_model

from openrlhf.checking.workbench import make_tokenizer, write_tiny_model
from openrlhf.cli.prove import main
from openrlhf.config import parse
from openrlhf.proving.registry import REGISTRY, Status
from openrlhf.proving.run import prove
from openrlhf.proving.sizes import Sizes
from openrlhf.rewards.base import Reward
from openrlhf.runs.launchers import make_launcher

AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    def __init__(self):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        reward = float(len(states["action_text"]) % 3)
        return {"rewards": reward, "done": self.turns == 2, "environment_feedback": "again"}


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
SIZES = Sizes(prompts=2, samples=3, response=8)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Models, data and an agent; every file is small."""
    folder = tmp_path_factory.mktemp("prove")
    write_tiny_model(folder / "model")
    write_mixture(folder / "mixture")
    write_tied(folder / "tied")
    (folder / "agent.py").write_text(AGENT)
    numbers = range(8)
    write(folder / "prompts.jsonl", [{"input": f"What is {i} + {i}?", "label": str(2 * i)} for i in numbers])
    chat = [{"role": role, "content": f"{role} {i}"} for i in (1, 2) for role in ("user", "assistant")]
    write(folder / "chats.jsonl", [{"messages": [*chat[:3], {**chat[3], "content": f"it is {i}"}]} for i in numbers])
    pairs = [{"prompt": f"What is {i}?", "chosen": f"It is {i}.", "rejected": "No idea"} for i in numbers]
    write(folder / "pairs.jsonl", pairs)
    write(folder / "plain.jsonl", [{"input": f"What is {i}?", "output": f"It is {i}."} for i in numbers])
    judged = [{"prompt": f"What is {i}?", "completion": f"It is {i}.", "label": bool(i % 2)} for i in numbers]
    write(folder / "judged.jsonl", judged)
    write_vision_model("qwen2_5_vl", folder / "vision")
    image(1).save(folder / "1.png")
    write(folder / "looks.jsonl", [{"input": f"look <image> {i}", "label": "", "images": ["1.png"]} for i in numbers])
    return folder


def write(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _decoder(**changes) -> dict:
    tokenizer = make_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return sizes | changes


def write_mixture(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = _decoder(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8, norm_topk_prob=True)
    hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def write_tied(folder: Path) -> None:
    torch.manual_seed(0)
    hf.Qwen2ForCausalLM(hf.Qwen2Config(**_decoder(tie_word_embeddings=True))).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


class LengthReward:
    """The length of an answer, in this process: no host has to start."""

    async def start(self) -> None:
        pass

    async def score(self, request):
        return [Reward(reward=float(len(query) % 5)) for query in request.queries]

    async def close(self) -> None:
        pass


@contextlib.contextmanager
def rewarded_here(config, tokenizer):
    """The launcher of the run, but for the reward."""
    with make_launcher(config, tokenizer) as launcher:
        yield _Rewarded(launcher, None if config.train.agent_func_path else LengthReward())


@dataclasses.dataclass
class _Rewarded:
    launcher: object
    source: object

    def reward(self):
        return self.source

    def build(self, **settings):
        return self.launcher.build(**settings)


def words(flags: dict) -> list[str]:
    result: list[str] = []
    for name, value in flags.items():
        if value is not None:
            result += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return result


def rl(place: Path, **flags) -> object:
    base = {
        "actor.model_name_or_path": place / "model",
        "data.prompt_dataset": place / "prompts.jsonl",
        "data.label_key": "label",
        "data.max_len": 128,
        "reward.remote_url": place / "rewards.py",  # the launcher has another
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.n_samples_per_prompt": 3,
        "vllm.num_engines": 0,
    }
    base |= {name.replace("__", "."): value for name, value in flags.items()}
    if "train.agent_func_path" in base:
        base["reward.remote_url"] = None
    return parse("train_ppo_ray", words(base))


def supervised(command: str, place: Path, **flags) -> object:
    base = {"model.model_name_or_path": place / "model", "data.max_len": 256}
    return parse(command, words(base | {name.replace("__", "."): value for name, value in flags.items()}))


def proved(config, *only: str):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return prove(config, only=only, sizes=SIZES, make=rewarded_here)
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------------------------------ the mutants

AGENT_RUN = {"train__agent_func_path": "agent.py", "rollout__agent_hosts": 0}
IMAGES = {
    "actor__model_name_or_path": "vision",
    "data__prompt_dataset": "looks.jsonl",
    "data__max_images_per_prompt": 1,
}

MUTANTS: dict[str, tuple[str, dict, list[tuple]]] = {
    "1 only the last micro-batch's gradient is kept": (
        "cuts",
        {},
        [
            (
                "openrlhf.backends.torch:TorchBackend.backward",
                ("    (loss *", "    self.drop_gradients()\n    (loss *"),
            )
        ],
    ),
    "2 whitening leaves other ranks out": (
        "shares",
        {"algo__advantage__estimator": "reinforce"},
        [
            (
                "openrlhf.learners.advantages:whiten_over_ranks",
                ("ranks.gather(Moments.of(advantages_A))", "[Moments.of(advantages_A)]"),
            )
        ],
    ),
    "3 a dual clip that is never passed on": (
        "loss",
        {"actor__dual_clip": 3},
        [("openrlhf.runs.rl_models:policy_settings", ("dual_clip=config.actor.dual_clip", "dual_clip=None"))],
    ),
    "4 advantages over prompts that were mixed up": (
        "advantages",
        {},
        [
            (
                "openrlhf.learners.advantages:training_samples",
                (
                    "if settings.estimator.needs_group and len(members) < 2:",
                    "place = list(groups).index(whole)\n"
                    "        rows = [other.scored for other in groups]\n"
                    "        members = tuple(rows[(place + k) % len(rows)][k] for k in range(len(rows[place])))\n"
                    "        if settings.estimator.needs_group and len(members) < 2:",
                ),
            )
        ],
    ),
    "5 the loss is a mean over micro-batches": (
        "cuts",
        {},
        [
            (
                "openrlhf.learners.steps:Step._pack",
                (
                    "(column[packed.rows] for column in self._columns)",
                    "(torch.full((packed.tokens.num_actions,), 1 / packed.tokens.num_actions / len(self._micro_batches))"
                    " for _ in self._columns)",
                ),
            )
        ],
    ),
    "6 the mask ends one token before its turn": (
        "masks",
        {},
        [
            (
                "openrlhf.agents.recorder:TokenRecorder.append_action",
                ("[True] * n,", "[True] * (n - 1) + [False],"),
            )
        ],
    ),
    "7 feedback is trained on": (
        "masks",
        AGENT_RUN,
        [
            (
                "openrlhf.agents.recorder:TokenRecorder.append_observation",
                ("[False] * n,", "[bool(self._token_ids)] * n,"),
            )
        ],
    ),
    "8 a tied head that stays stale": ("pushes", {"actor__model_name_or_path": "tied"}, [("engine", "stale_head")]),
    "9 gate and up projections swapped at the second load": (
        "pushes",
        {"actor__model_name_or_path": "mixture"},
        [("engine", "swaps")],
    ),
    "10 an adapter that reaches no module of the engine": (
        "pushes",
        {"ds__lora__rank": 4},
        [
            ("engine",),
            ("openrlhf.models.adapters:_sum", ("(weight.float() + change)", "weight.float()")),
        ],
    ),
    "10 an adapter that leaves modules out": (
        "adapter",
        {"ds__lora__rank": 4},
        [
            (
                "openrlhf.models.adapters:add_adapter",
                ("_OUTSIDE_OF_DECODERS if only_decoder else None", "r'.*(q_proj|down_proj)'"),
            )
        ],
    ),
    "11 alpha / rank applied twice": (
        "adapter",
        {"ds__lora__rank": 4, "ds__lora__alpha": 16},
        [
            (
                "openrlhf.models.adapters:add_adapter",
                ("lora_alpha=lora.alpha", "lora_alpha=lora.alpha * lora.alpha // lora.rank"),
            )
        ],
    ),
    "12 keys of older weights": (
        "pushes",
        AGENT_RUN,
        [("openrlhf.rollout.embedded.engine:EmbeddedEngine.resume", ("self._decoder.forget()", "pass"))],
    ),
    "13 prompts with images expanded twice": (
        "images",
        IMAGES,
        [
            (
                "openrlhf.models.image_processor:ImageProcessor.expand",
                ("expanded += image.token_ids", "expanded += image.token_ids + image.token_ids[1:-1]"),
            ),
            ("openrlhf.rollout.base:check_images", ("if stray := sorted(", "if stray := list(()) and sorted(")),
        ],
    ),
    "14 pixels normalised twice": (
        "images",
        IMAGES,
        [
            (
                "openrlhf.models.image_processor:ImageProcessor.prepare",
                (
                    "    return ImageInput(",
                    "    tensors['pixel_values'] = (tensors['pixel_values'] - 0.5) / 0.5\n    return ImageInput(",
                ),
            )
        ],
    ),
    "15 returns cut at observations": (
        "returns",
        {"algo__advantage__estimator": "reinforce"},
        [
            (
                "openrlhf.learners.advantages:give_credit",
                (
                    "offsets = batch.episode_offsets",
                    "ends = torch.cat([s.segment.turn_ends_A for s in batch.samples]).nonzero().flatten() + 1\n"
                    "    offsets = [0, *ends.tolist()]",
                ),
            )
        ],
    ),
    "16 labels rolled after the cut": (
        "log-probs",
        {},
        [
            (
                "openrlhf.models.policy:Policy.forward",
                ("tokens.token_ids[tokens.action_positions]", "tokens.token_ids[tokens.action_positions].roll(-1)"),
            )
        ],
    ),
    "17 finished groups dropped": (
        "resume",
        {"train__async_enable": True},
        [
            (
                "openrlhf.rollout.async_collector:AsyncCollector.load_state_dict",
                ('in state["waiting"]:', 'in state["waiting"][1:]:'),
            )
        ],
    ),
    "18 a resumed run that skips prompts": (
        "resume",
        {},
        [
            (
                "openrlhf.data.prompts:PromptStream.load_state_dict",
                ('self._next = state["next_ordinal"]', 'self._next = state["next_ordinal"] + 1'),
            )
        ],
    ),
    "19 end-of-sequence written over truncated samples": (
        "masks",
        {},
        [
            (
                "openrlhf.agents.single_turn:SingleTurnAgentExecutor.play",
                (
                    "recorder.append_action(generation)",
                    "generation.token_ids[-1] = hf_tokenizer.eos_token_id\n    recorder.append_action(generation)",
                ),
            )
        ],
    ),
    "20 log-probs before temperature": (
        "log-probs",
        {"rollout__temperature": 0.7},
        [("openrlhf.models.policy:Policy.forward", ('"temperature": temperature', '"temperature": 1.0'))],
    ),
    "21 entropy before temperature": (
        "loss",
        {"rollout__temperature": 0.7, "actor__entropy_coef": 0.01},
        [
            (
                "openrlhf.models.policy:Policy.forward",
                (
                    "    others = (",
                    "    if with_entropy:\n"
                    "        _, entropy_a = chunked_logprobs(\n"
                    "            hidden_aD, head.weight, share.own(tokens.token_ids[tokens.action_positions]),\n"
                    "            with_entropy=True)\n"
                    "    others = (",
                ),
            )
        ],
    ),
    "22 a KL coefficient that goes negative": (
        "kl coefficient",
        {"algo__kl__init_coef": 0.1, "algo__kl__target": 0.1, "algo__kl__horizon": 20},
        [
            (
                "openrlhf.algorithms.kl:AdaptiveKL.update",
                ("max(1.0 + error * samples / self._horizon, 0.5)", "1.0 + error * samples / self._horizon"),
                ("max(self.coef * factor, self._least)", "self.coef * factor"),
            )
        ],
    ),
    "23 z-scores of rounding errors": (
        "agreement",
        {},
        [
            (
                "openrlhf.algorithms.advantages:compared",
                (".masked_fill(_agree(values_M, sizes_M), 0.0)", ""),
            )
        ],
    ),
    "24 a reference that is trained along": (
        "reference",
        {"algo__kl__init_coef": 0.1},
        [("openrlhf.runs.rl_models:load_models", ("reference = load_reference(config, device)", "reference = policy"))],
    ),
}
"""Number and name, as docs/prove.md has them → the proof that finds it, the flags of a run that has it, and the change
of our code: a function with texts and what they become, or a fault of an engine with weights of its own."""


def flags_at(place: Path, flags: dict) -> dict:
    """Names of files become paths."""
    return {name: place / value if (place / str(value)).exists() else value for name, value in flags.items()}


@pytest.mark.parametrize("name", MUTANTS)
def test_prove_finds(name, place, monkeypatch):
    expected, flags, changes = MUTANTS[name]
    with contextlib.ExitStack() as held:
        for target, *rest in changes:
            if target == "engine":
                kind = own_weights(**dict.fromkeys(rest, True))
                monkeypatch.setitem(sys.modules["openrlhf.runs.engines"].ENGINES, "embedded", kind)
            else:
                held.enter_context(mutated(target, *rest))
        report = proved(rl(place, **flags_at(place, flags)), expected)
    assert [verdict.proof.name for verdict in report.failed] == [expected], report.to_json()
    assert "Error: " not in report.failed[0].detail, "it is found, and does not only break something"
    assert report.status == 1


def test_a_mutant_that_cannot_be_applied_says_so():
    with (
        pytest.raises(CannotApply, match="has 0 times 'no such line'"),
        mutated("openrlhf.algorithms.kl:AdaptiveKL.update", ("no such line", "")),
    ):
        pass


# ---------------------------------------------------------------------------------------------------- no false alarm

RUNS = {
    "ppo with a critic": {
        "algo__advantage__estimator": "gae",
        "algo__advantage__gamma": 0.97,
        "algo__advantage__lambd": 0.9,
        "algo__kl__init_coef": 0.05,
        "algo__kl__target": 0.1,
        "actor__entropy_coef": 0.01,
        "actor__dual_clip": 3,
        "rollout__temperature": 0.7,
    },
    "gspo with a KL loss": {
        "actor__policy_loss_type": "gspo",
        "algo__kl__init_coef": 0.05,
        "algo__kl__use_loss": True,
        "algo__kl__estimator": "k3",
        "algo__advantage__is_correction_enable": True,
    },
    "multi turn": AGENT_RUN | {"algo__advantage__estimator": "reinforce_baseline", "algo__advantage__turns": "to_go"},
    "adapter": {"ds__lora__rank": 4, "algo__kl__init_coef": 0.05, "train__dynamic_batch_enable": True},
    "its own teacher": {"teacher__policy": "initial", "teacher__loss": "reverse", "ds__lora__rank": 4},
    "taught by another prompt": {"teacher__policy": "current", "teacher__prompt_key": "label", "teacher__gamma": 0.5},
    "distilled by a loss": {"teacher__model_name_or_path": "tied", "teacher__loss": "js", "teacher__top_k": 12},
    "distilled by a reward": {
        "teacher__model_name_or_path": "tied",
        "teacher__gamma": 0.5,
        "teacher__coef": 0.3,
        "algo__advantage__estimator": "reinforce",
        "train__max_epochs": 2,
    },
    "mixture of experts": {"actor__model_name_or_path": "mixture", "train__max_epochs": 2},
    "async": {"train__async_enable": True, "algo__advantage__is_correction_enable": True},
    "partial rollouts": {
        "train__async_enable": True,
        "train__partial_rollout_enable": True,
        "algo__advantage__estimator": "rloo",
        "algo__loss_agg": "sequence",
    },
    "images": IMAGES,
}


RESUMED = ("ppo with a critic", "multi turn", "partial rollouts", "images")
"""Whole runs take most of the time: each way to play is resumed once."""


@pytest.mark.parametrize("name", RUNS)
def test_prove_raises_no_false_alarm(name, place):
    tried = set(REGISTRY) - (set() if name in RESUMED else {"resume"}) - {"ranks"}
    report = proved(rl(place, **flags_at(place, RUNS[name])), *tried)
    assert (report.failed, report.untried) == ([], [])
    applied = {verdict.proof.name for verdict in report.verdicts if verdict.status is Status.PASS}
    assert {"rollouts", "masks", "log-probs", "loss", "cuts", "pushes", "advantages"} <= applied
    assert ("resume" in applied) == (name in RESUMED)


@pytest.mark.parametrize("loss", ["gmpo", "luspo", "vespo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"])
def test_prove_knows_the_loss(loss, place):
    """Beside `tests/unit/test_proving.py`, which compares the formulas alone: in a whole update."""
    report = proved(rl(place, actor__policy_loss_type=loss, rollout__n_samples_per_prompt=2), "loss")
    applied = {verdict.proof.name for verdict in report.verdicts if verdict.status is Status.PASS}
    assert (report.failed, report.untried) == ([], []), report.to_json()
    assert "loss" in applied


@pytest.mark.parametrize("estimator", ["gdpo", "remax", "maxrl", "pass_at_k"])
def test_prove_knows_the_estimator(estimator, place):
    flags = {"algo__advantage__estimator": estimator, "algo__advantage__pass_k": 2, "algo__kl__init_coef": 0.05}
    report = proved(rl(place, **flags), "advantages", "returns", "agreement", "shares")
    assert (report.failed, report.untried) == ([], []), report.to_json()


CHATS = {"data__dataset": "chats.jsonl", "data__input_key": "messages", "data__apply_chat_template": True}
SUPERVISED_RUNS = {
    "sft": ("train_sft", CHATS | {"data__multiturn": True}),
    "sft with an adapter": ("train_sft", CHATS | {"ds__lora__rank": 4}),
    "dpo": ("train_dpo", {"data__dataset": "pairs.jsonl", "model__label_smoothing": 0.1, "model__nll_loss_coef": 0.2}),
    "ipo": ("train_dpo", {"data__dataset": "pairs.jsonl", "model__ipo_enable": True, "ds__lora__rank": 4}),
    "kto": ("train_dpo", {"data__dataset": "judged.jsonl", "model__loss_type": "kto"}),
    "reward model": ("train_rm", {"data__dataset": "pairs.jsonl"}),
}


@pytest.mark.parametrize("name", SUPERVISED_RUNS)
def test_prove_raises_no_false_alarm_of_supervised_runs(name, place):
    command, flags = SUPERVISED_RUNS[name]
    report = proved(supervised(command, place, **flags_at(place, flags)))
    assert (report.failed, report.untried) == ([], [])
    assert {"batches", "resume"} <= {v.proof.name for v in report.verdicts if v.status is Status.PASS}
    if name == "sft":
        (verdict,) = (v for v in report.verdicts if v.proof.name == "targets")
        assert "4 of 4 compared with the template" in verdict.detail


# ------------------------------------------------------------------------------------------- examples and the command


def changed(section, changes: dict):
    """A configuration with other values of these flags."""
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        new = changed(getattr(section, head), {rest: value}) if rest else value
        section = dataclasses.replace(section, **{head: new})
    return section


def substituted(started, place: Path) -> object:
    """A command of a script with a small model and our data, in one process."""
    config = parse(started.command, started.words)
    model = str(place / "model")
    if started.command != "train_ppo_ray":
        data = {"train_sft": "plain.jsonl", "train_rm": "pairs.jsonl", "train_dpo": "pairs.jsonl"}[started.command]
        small = {"model.model_name_or_path": model, "data.dataset": str(place / data), "data.max_len": 256}
        if started.command == "train_sft":
            small |= {"data.input_key": "input", "data.output_key": "output"}
        else:
            small |= {"data.prompt_key": "prompt", "data.chosen_key": "chosen", "data.rejected_key": "rejected"}
        return changed(config, small)
    small = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": str(place / "prompts.jsonl"),
        "data.input_key": "input",
        "data.label_key": "label",
        "data.max_len": 128,
        "vllm.num_engines": 0,
        "critic.model_name_or_path": model if config.uses_critic else None,
        "reward.model_name_or_path": None,  # the launcher of these tests has a reward
        "reward.remote_url": None,
    }
    if config.train.agent_func_path:
        small |= {"train.agent_func_path": str(place / "agent.py"), "rollout.agent_hosts": 0}
    return changed(config, small)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_prove_raises_no_false_alarm_of_an_example(script, place, tmp_path):
    """The update of its first command that trains, with the flags that the script has."""
    started = next(one for one in started_by(script, tmp_path) if one.command.startswith("train_"))
    report = proved(
        substituted(started, place), "masks", "loss", "cuts", "advantages", "critic", "objective", "batches"
    )
    assert (report.failed, report.untried) == ([], [])
    assert any(verdict.proof.name in ("loss", "objective") for verdict in report.verdicts)


REWARD = """
def reward_func(queries, prompts, labels):
    return [float(len(query) % 5) for query in queries]
"""


def test_the_command_prints_a_table_and_json(place, tmp_path, capfd, monkeypatch):
    """With a launcher's words before it, as a user has it in a script."""
    monkeypatch.chdir(tmp_path)
    (place / "rewards.py").write_text(REWARD)
    flags = {
        "pretrain": place / "model",
        "prompt_data": place / "prompts.jsonl",
        "label_key": "label",
        "remote_rm_url": place / "rewards.py",
        "advantage_estimator": "rloo",
        "max_len": 128,
        "init_kl_coef": 0,
        "vllm.num_engines": 0,
    }
    command = ["python", "-m", "openrlhf.cli.train_ppo_ray", *words(flags)]
    assert main(["--only", "masks,advantages", *command]) == 0
    out, err = capfd.readouterr()
    assert "pass  exactly the sampled tokens are trained on" in out
    assert "trained on ⟦in brackets⟧: What is " in out
    assert "3 pass; " in out
    assert "… exactly the sampled tokens are trained on" in err
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    broken = ("openrlhf.agents.recorder:TokenRecorder.append_action", ("[True] * n,", "[True] * (n - 1) + [False],"))
    with mutated(*broken):
        assert main(["--json", "--only", "masks", *command]) == 1
    report = json.loads(capfd.readouterr().out)
    assert report["ok"] is False
    (verdict,) = (one for one in report["proofs"] if one["name"] == "masks")
    assert verdict["status"] == "fail"
    assert re.search(r"token \d+ .* was sampled by the engine, and is not trained on", verdict["detail"])
    assert verdict["remedy"]


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ([], 2, "which command?"),
        (["rl", "--no.such_flag", "1"], 2, "openrlhf prove rl: error: --no.such_flag is unknown"),
        (["--minutes", "0", "sft"], 2, "must be a number > 0"),
        (["rl", "--pretrain", "/no/such/model", "--prompt_data", "p.jsonl", "--remote_rm_url", "r.py"], 1, "p.jsonl"),
    ],
)
def test_a_wrong_command_is_a_line(given, status, said, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        found = main(given)
    except SystemExit as end:
        found = end.code
    assert found == status
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_a_proof_that_is_not_there_is_named(place, capfd):
    flags = {"model.model_name_or_path": place / "model", "data.dataset": place / "pairs.jsonl"}
    assert main(["--only", "loses", "dpo", *words(flags)]) == 2
    assert "--only loses: there is no such proof; did you mean 'loss'?" in capfd.readouterr().err


def test_the_document_has_every_proof_and_every_mutant():
    text = (Path(__file__).parents[2] / "docs" / "prove.md").read_text()
    assert set(re.findall(r"^\| `([\w -]+)` \|", text, re.MULTILINE)) == REGISTRY.keys()
    table = re.findall(r"^\| (\d+) \| (.+?) \| `(.+?)` \|$", text, re.MULTILINE)
    assert [(f"{number} {name}", found_by) for number, name, found_by in table] == [
        (name, expected) for name, (expected, _, _) in MUTANTS.items()
    ]
