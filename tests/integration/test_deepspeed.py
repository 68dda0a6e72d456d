"""DeepSpeed on two CPU ranks trains what one process with plain torch trains, step by step, whatever is shared out."""

import itertools
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from preloaded import finish, run_ranks, start, start_ranks
from processes import wait_until
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from vision_models import KINDS, write_vision_model

from openrlhf.demo.model import make_tokenizer
from openrlhf.observability.loggers import read_metrics

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).resolve().parents[1] / "support"
REPOSITORY = SUPPORT.parents[1]
STEPS = 20

TRAINERS = {
    "sft": ("train_sft", {"data.dataset": "sft.jsonl", "data.output_key": "output", "data.input_template": "{}", "eval.dataset": "sft_eval.jsonl"}),
    "rm": ("train_rm", {"data.dataset": "pairs.jsonl", "data.prompt_key": "prompt", "eval.dataset": "pairs_eval.jsonl"}),
    "dpo": ("train_dpo", {"data.dataset": "pairs.jsonl", "data.prompt_key": "prompt", "eval.dataset": "pairs_eval.jsonl"}),
    "kto": ("train_dpo", {"data.dataset": "judged.jsonl", "model.loss_type": "kto", "eval.dataset": "judged.jsonl"}),
}  # fmt: skip
MUON = {"optim": "muon", "muon.lr": 2e-3}
TWO_RANKS = {
    "zero 0": {"ds.zero_stage": 0},
    "zero 1": {"ds.zero_stage": 1},
    "zero 2": {"ds.zero_stage": 2},
    "zero 3": {"ds.zero_stage": 3},
    "offload": {"ds.zero_stage": 2, "ds.adam_offload": True},
    "zero 3 offload": {"ds.zero_stage": 3, "ds.adam_offload": True},
    "checkpointing": {"ds.zero_stage": 3, "model.gradient_checkpointing_enable": True},
    "small budget": {"ds.zero_stage": 3, "train.micro_batch_size": 1},
    "lora": {"ds.zero_stage": 3, "ds.lora.rank": 4},
    "qlora": {"ds.zero_stage": 2, "ds.lora.rank": 4, "ds.load_in_4bit": True},
    "experts": {"ds.zero_stage": 2, "model.aux_loss_coef": 0.1},
    "experts zero 3": {"ds.zero_stage": 3, "model.aux_loss_coef": 0.1},
    "muon zero 1": {"ds.zero_stage": 1, **MUON},
    "muon zero 2 offload": {"ds.zero_stage": 2, "ds.adam_offload": True, **MUON},
    "muon zero 3": {"ds.zero_stage": 3, **MUON},
}
ALONE = {
    "lora": {"ds.lora.rank": 4},
    "qlora": {"ds.lora.rank": 4, "ds.load_in_4bit": True},
    "experts": {"model.aux_loss_coef": 0.1},
    "muon": MUON,
}
"""What cases are compared with that begin so; the others with plain flags."""
CASES = [("sft", way) for way in TWO_RANKS]
CASES += [(trainer, f"zero {stage}") for trainer in ("rm", "dpo", "kto") for stage in (2, 3)]
TENSOR_PARALLEL = {
    "tp zero 0": {"ds.tensor_parallel_size": 2, "ds.zero_stage": 0},
    "tp zero 1": {"ds.tensor_parallel_size": 2, "ds.zero_stage": 1},
    "tp zero 3": {"ds.tensor_parallel_size": 2, "ds.zero_stage": 3},
    "muon tp": {"ds.tensor_parallel_size": 2, "ds.zero_stage": 1, **MUON},
    "lora tp": {"ds.tensor_parallel_size": 2, "ds.zero_stage": 2, "ds.lora.rank": 4},
}
CUT = [("sft", way) for way in TENSOR_PARALLEL] + [(trainer, "tp zero 1") for trainer in ("rm", "dpo")]
CONTEXT = {
    "cp zero 0": {"ds.ring_attn_size": 2, "ds.zero_stage": 0},
    "cp zero 1": {"ds.ring_attn_size": 2, "ds.zero_stage": 1},
    "cp zero 2": {"ds.ring_attn_size": 2, "ds.zero_stage": 2},
    "cp zero 3": {"ds.ring_attn_size": 2, "ds.zero_stage": 3},
    "cp checkpointing": {"ds.ring_attn_size": 2, "ds.zero_stage": 3, "model.gradient_checkpointing_enable": True},
    "lora cp": {"ds.ring_attn_size": 2, "ds.zero_stage": 3, "ds.lora.rank": 4},
    "experts cp": {"ds.ring_attn_size": 2, "ds.zero_stage": 2, "model.aux_loss_coef": 0.1},
    "muon cp": {"ds.ring_attn_size": 2, "ds.zero_stage": 1, **MUON},
}
CASES += [("sft", way) for way in CONTEXT]
CASES += [(trainer, "cp zero 2") for trainer in ("rm", "dpo", "kto")]
RELAY = [
    ("alone", {}),
    ("two", {"ds.zero_stage": 3}),
    ("two", {"ds.zero_stage": 0}),
    ("two", {"ds.zero_stage": 2}),
    ("two", {"ds.zero_stage": 1}),
    ("alone", {}),
    ("two", {"ds.ring_attn_size": 2}),
    ("two", {"ds.tensor_parallel_size": 2}),
]
"""Who trains which epoch of one run, each continuing from the checkpoint of the one before."""


def expected_run(trainer: str, way: str) -> str:
    first = way.partition(" ")[0]
    return f"alone {first if first in ALONE else trainer}"


def precision(way: str, otherwise: float = 1e-4) -> float:
    """Muon orthogonalises in bf16, whose rounding shows; at a higher rate it grows, in one process as in two.

    How balanced experts are is a matter of the tokens that are routed together, and ranks cut a step differently, unless
    they share every stream.
    """
    if way == "experts cp":
        return otherwise
    return {"muon": 1e-3, "experts": 1e-2}.get(way.partition(" ")[0], otherwise)


class Runs:
    """Command lines and what became of them, one folder each."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder = folder
        self._model = model
        self._data = data
        self._failed: dict[str, str] = {}
        """What was said by the runs that did not end well. They fail the tests that ask for them, and no others."""

    def words(self, name: str, trainer: str, **flags) -> list[str]:
        command, own = TRAINERS[trainer]
        values = {
            "model.model_name_or_path": self._model,
            "data.max_len": 16,
            "train.batch_size": 16,
            "train.micro_batch_size": 4,
            "train.max_epochs": STEPS // 4,
            "adam.lr": 1e-3,
            "adam.weight_decay": 0.1,
            "ckpt.output_dir": self.folder / name / "model",
            "logger.run_dir": self.folder / name / "run",
        } | {key: self._data / value if key.endswith("dataset") else value for key, value in own.items()}
        values |= flags
        return [command, *(w for key, value in values.items() for w in ([f"--{key}"] if value is True else [f"--{key}", str(value)]))]  # fmt: skip

    def start(self, *command: str) -> subprocess.CompletedProcess:
        env = os.environ | {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "cache"),
        }
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-12000:]
        return done

    def run(self, who: str, script: str, *words: str | Path) -> None:
        """A script of `support`, `alone` in one process or on `two` or `four` ranks."""
        said, cache = self.folder / "said.txt", {"HF_DATASETS_CACHE": str(self.folder / "cache")}
        command = [str(SUPPORT / script), *map(str, words)]
        if who == "alone":
            finish([start(command, cwd=self.folder, said=said, environment=cache)], said)
        else:
            run_ranks({"two": 2, "four": 4}[who], command, cwd=self.folder, said=said, environment=cache)

    def kill(self, name: str, words: list[str], *, ranks: int, step: int) -> None:
        """Start it, and SIGKILL all ranks as soon as that step is logged."""
        said, cache = self.folder / "said.txt", {"HF_DATASETS_CACHE": str(self.folder / "cache")}
        command = ["-m", f"openrlhf.cli.{words[0]}", *words[1:]]
        processes = start_ranks(ranks, command, cwd=self.folder, said=said, environment=cache)
        logged = self.folder / name / "run" / "metrics.jsonl"
        wait_until(
            lambda: (
                any(process.exitcode is not None for process in processes)
                or (logged.exists() and logged.read_bytes().count(b'"kind": "train"') >= step)
            ),
            seconds=300,
        )
        for process in processes:
            process.kill()
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [-signal.SIGKILL] * ranks, said.read_text()[-12000:]

    def train(self, who: str, commands: list[list[str]]) -> None:
        """One after the other. Where one does not end well, new processes go on with the next."""
        listed, done = self.folder / "runs.json", self.folder / "runs.json.done"
        while commands:
            listed.write_text(json.dumps(commands))
            done.write_text("0")
            try:
                self.run(who, "many_runs.py", listed)
            except AssertionError as error:
                ended = int(done.read_text())
                if ended == len(commands):
                    raise
                run_dir = Path(commands[ended][commands[ended].index("--logger.run_dir") + 1])
                self._failed[run_dir.parent.name] = str(error)
                commands = commands[ended + 1 :]
            else:
                return

    def _folder(self, name: str) -> Path:
        if name in self._failed:
            pytest.fail(f"the run {name!r} did not end well:\n{self._failed[name]}")
        return self.folder / name

    def history(self, name: str, *metrics: str) -> list[list[float]]:
        rows = [r for r in read_metrics(self._folder(name) / "run" / "metrics.jsonl") if r["kind"] == "train"]
        return [[row[metric] for metric in metrics] for row in rows]

    def evaluation(self, name: str) -> dict[str, float]:
        rows = [r for r in read_metrics(self._folder(name) / "run" / "metrics.jsonl") if r["kind"] == "eval"]
        return {key: value for key, value in rows[-1].items() if "loss" in key or "acc" in key or "reward" in key}

    def model(self, name: str) -> Path:
        return self._folder(name) / "model"


def write_model(folder: Path, **shape: int) -> Path:
    """The demo's tokenizer with a much smaller model: four heads and an even vocabulary, so that it can be cut in two."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        intermediate_size=64,
        num_hidden_layers=2,
        **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2} | shape,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_experts(folder: Path, tiny: Path) -> Path:
    """A mixture of four experts with the tokenizer of `tiny`."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data) -> Runs:
    """Every case on two ranks, and each trainer in one process with plain torch."""
    folder = tmp_path_factory.mktemp("runs")
    runs = Runs(folder, write_model(folder / "tiny"), data)
    experts = {"model.model_name_or_path": write_experts(folder / "experts", folder / "tiny")}

    def flags_of(way: str, flags: dict) -> dict:
        return {**flags, **(experts if way.startswith("experts") else {})}

    alone = [runs.words(f"alone {trainer}", trainer) for trainer in TRAINERS]
    alone += [runs.words(f"alone {way}", "sft", **flags_of(way, flags)) for way, flags in ALONE.items()]
    pairs = [
        runs.words(f"{way} {trainer}", trainer, **flags_of(way, (TWO_RANKS | CONTEXT)[way])) for trainer, way in CASES
    ]
    cut = [runs.words(f"{way} {trainer}", trainer, **TENSOR_PARALLEL[way]) for trainer, way in CUT]
    runs.train("alone", alone)
    runs.train("two", pairs + cut)
    return runs


@pytest.mark.parametrize(("trainer", "way"), [*CASES, *CUT])
def test_losses_and_gradient_norms_are_those_of_one_process(runs, trainer, way):
    loss = "gpt_loss" if trainer == "sft" else "loss"
    expected = runs.history(expected_run(trainer, way), loss, "grad_norm", "lr")
    measured = runs.history(f"{way} {trainer}", loss, "grad_norm", "lr")
    assert len(expected) == STEPS
    for step, (ours, theirs) in enumerate(zip(measured, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=precision(way)), (step, ours, theirs)


@pytest.mark.parametrize(("trainer", "way"), CASES)
def test_evaluation_is_that_of_one_process(runs, trainer, way):
    expected = runs.evaluation(expected_run(trainer, way))
    assert runs.evaluation(f"{way} {trainer}") == pytest.approx(expected, rel=precision(way, 1e-3))
    assert expected


@pytest.mark.parametrize(
    "way",
    [
        way
        for way in [*(way for trainer, way in CASES if trainer == "sft"), *TENSOR_PARALLEL]
        if way.partition(" ")[0] not in ALONE
    ],
)
def test_the_model_that_is_left_is_that_of_one_process(runs, way):
    expected = AutoModelForCausalLM.from_pretrained(runs.model("alone sft")).state_dict()
    written = AutoModelForCausalLM.from_pretrained(runs.model(f"{way} sft")).state_dict()
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name] == pytest.approx(tensor, rel=1e-3, abs=1e-4), name


def test_a_reward_model_of_stage_3_has_its_head(runs):
    for name in ("alone rm", "zero 3 rm"):
        AutoModelForSequenceClassification.from_pretrained(runs.model(name), num_labels=1)
    expected, written = (
        AutoModelForSequenceClassification.from_pretrained(runs.model(name)).score.weight
        for name in ("alone rm", "zero 3 rm")
    )
    assert written.detach() == pytest.approx(expected.detach(), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(("optim", "whole"), [("adam", RELAY), ("muon", RELAY[:5])], ids=["adam", "muon"])
def test_a_run_goes_on_with_other_ranks_stages_and_backends(runs, optim, whole):
    """One epoch each; the checkpoints, and so the losses, are those of one process that trains them all."""
    common = {"lr_scheduler": "constant_with_warmup", "lr_warmup_ratio": 0, **MUON, "optim": optim}
    names = [f"undisturbed {optim}", f"relay {optim}"]
    relay = {**common, "ckpt.path": runs.folder / names[1] / "ckpt", "ckpt.save_steps": 4, "ckpt.load_enable": True}
    runs.train("alone", [runs.words(names[0], "sft", **common, **{"train.max_epochs": len(whole)})])
    legs = [
        (who, runs.words(names[1], "sft", **relay, **flags, **{"train.max_epochs": epoch}))
        for epoch, (who, flags) in enumerate(whole, start=1)
    ]
    for who, group in itertools.groupby(legs, key=operator.itemgetter(0)):
        runs.train(who, [words for _, words in group])
    expected, measured = (runs.history(name, "gpt_loss", "grad_norm") for name in names)
    assert len(expected) == 4 * len(whole)
    assert len(measured) == len(expected)
    for step, (ours, theirs) in enumerate(zip(measured, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=precision(optim, 1e-3)), (step, ours, theirs)


GOES_ON = {
    "one process": ("alone", {}),
    "degree 1": ("four", {"ds.zero_stage": 3}),
    "degree 2": ("four", {"ds.zero_stage": 2, "ds.ring_attn_size": 2}),
    "degree 4": ("four", {"ds.zero_stage": 1, "ds.ring_attn_size": 4}),
    "degree 2, layers shared": ("four", {"ds.zero_stage": 1, "ds.ring_attn_size": 2, "ds.tensor_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory, data) -> Runs:
    """Four ranks that share streams in pairs, by heads, are killed after a checkpoint. Copies of what they left go on:
    with a degree of 4 by ring, for six heads cannot be shared out to four ranks, nor three of half a layer to two."""
    folder = tmp_path_factory.mktemp("killed")
    model = write_model(folder / "tiny", hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    runs = Runs(folder, model, data)

    def words(name: str, flags: dict) -> list[str]:
        common = {"adam.eps": 1e-4, "ckpt.save_steps": 4, "ckpt.load_enable": True, "ckpt.path": folder / name / "ckpt"}
        return runs.words(name, "sft", **common, **flags)  # a larger eps: signs of tiny gradients do not decide

    runs.kill("killed", words("killed", GOES_ON["degree 2"][1]), ranks=4, step=9)
    for name in GOES_ON:
        shutil.copytree(folder / "killed" / "ckpt", folder / name / "ckpt")
    commands = {"alone": [], "four": [words("undisturbed", GOES_ON["degree 2"][1])]}
    for name, (who, flags) in GOES_ON.items():
        commands[who].append(words(name, flags))
    for who, listed in commands.items():
        runs.train(who, listed)
    return runs


@pytest.mark.parametrize("name", GOES_ON)
def test_ranks_that_were_killed_go_on_with_another_degree(killed, name):
    expected = AutoModelForCausalLM.from_pretrained(killed.model("undisturbed")).state_dict()
    written = AutoModelForCausalLM.from_pretrained(killed.model(name)).state_dict()
    assert written.keys() == expected.keys()
    for parameter, tensor in expected.items():
        torch.testing.assert_close(written[parameter], tensor, rtol=0, atol=1e-5, msg=parameter)
    went_on = int((killed.folder / "killed" / "ckpt" / "latest").read_text().strip().removeprefix("global_step"))
    steps, straight = (killed.history(run, "gpt_loss", "grad_norm") for run in (name, "undisturbed"))
    assert len(steps) == len(straight) - went_on == STEPS - went_on
    assert 0 < len(steps) <= 12
    assert steps == [pytest.approx(step, rel=1e-4) for step in straight[went_on:]]


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "python"])
def test_every_launcher_starts_a_training(runs, launcher):
    command, *words = runs.words(launcher, "sft", **{"train.max_epochs": 1, "ds.zero_stage": 2})
    module, bin_ = f"openrlhf.cli.{command}", Path(sys.executable).parent
    start = {
        "deepspeed": [str(bin_ / "deepspeed"), "--num_gpus", "2", "--module", module],
        "torchrun": [str(bin_ / "torchrun"), "--standalone", "--nproc-per-node", "2", "-m", module],
        "python": [sys.executable, "-m", module, "--train.backend", "deepspeed"],
    }[launcher]
    runs.start(*start, *words)
    measured, expected = (
        runs.history(launcher, "gpt_loss", "grad_norm"),
        runs.history("alone sft", "gpt_loss", "grad_norm"),
    )
    assert len(measured) == 4
    assert measured[0] == pytest.approx(expected[0], rel=1e-4)
    assert "model" in {path.name for path in (runs.folder / launcher).iterdir()}


def test_a_number_that_is_none_on_one_rank_costs_all_ranks_that_step_and_nothing_else(tmp_path):
    """In the gradient, the weights or the optimizer: weights, moments, average and schedule are, to the bit, those of a
    training without that step, whatever the stage; and weights that nobody knows any more end it on all ranks."""
    Runs(tmp_path, tmp_path, tmp_path).run("two", "finite_ranks.py", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found) == 15 * 3 + 2
    assert [case for case, seen in found.items() if not seen["same"]] == []
    assert [case for case, seen in found.items() if len(seen["said"]) != 1] == []
    assert all(seen["said"][0].startswith("2: ") for case, seen in found.items() if "lost" not in case)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("images")
    for kind in KINDS:
        write_vision_model(kind, folder / kind)
    Runs(folder, folder, folder).run("two", "vision_ranks.py", folder)
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["zero 0", "zero 2", "zero 3", "zero 3, frozen tower"])
def test_a_rank_without_images_trains_with_one_that_has_some(images, kind, way):
    """It encodes an image for the sake of the other, and the weights are those of one process with all samples."""
    found = images[f"{kind}, {way}"]
    assert max(found["gaps"].values()) <= 1e-5
    assert (max(moved_in_tower(found)) == 0) is ("frozen" in way)


def moved_in_tower(found: dict) -> list[float]:
    return [moved for name, moved in found["moved"].items() if "language_model" not in name and "head" not in name]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_a_stream_with_images(images, kind):
    """Each encodes all images, and puts those features in the place of tokens whose tokens it has."""
    found = images[f"{kind}, zero 3, context 2"]
    assert max(found["gaps"].values()) <= 1e-5
    assert max(moved_in_tower(found)) > 0


@pytest.fixture(scope="module")
def half(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("half")
    Runs(folder, folder, folder).run("two", "fp16_ranks.py", folder / "out.json")
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("stage", range(4))
def test_fp16_scales_and_leaves_out_what_one_process_does(half, stage):
    """Two of five steps overflow: three are taken, at a quarter of the scale, the first of them two ago."""
    torchs, ours, loaded = (half[str(stage)][who] for who in ("torch", "deepspeed", "loaded"))
    assert torchs["numbers"] == {"steps": 3, "loss_scale": 2.0**14, "good_steps": 2}
    assert ours["numbers"] == loaded["numbers"] == torchs["numbers"]
    assert [norm == -1.0 for norm, _ in ours["steps"]] == [False, True, True, False, False]
    assert torch.tensor(ours["steps"]) == pytest.approx(torch.tensor(torchs["steps"]), rel=1e-3)
    for name, tensor in torchs["tensors"].items():
        assert torch.allclose(torch.tensor(ours["tensors"][name]), torch.tensor(tensor), rtol=1e-3, atol=1e-5), name
        assert loaded["tensors"][name] == ours["tensors"][name], name


def test_gradients_are_summed_in_the_dtype_that_is_asked_for(tmp_path):
    """256 + 1 + 1 on two ranks is 258 in fp32 and in fp16; in bf16, where the number after 256 is 258, each 1 is lost.
    A sum that was dropped leaves nothing behind."""
    Runs(tmp_path, tmp_path, tmp_path).run("two", "sum_ranks.py", tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    sums = {case: seen["sum"] for case, seen in found.items()}
    stages = [f"zero {stage}" for stage in range(4)]
    offloaded = [f"zero {stage} offload" for stage in (1, 2, 3)]
    expected = {f"{stage} bf16, fp32 sums": 258 for stage in [*stages, *offloaded]}
    expected |= {f"{stage} bf16, bf16 sums": 256 for stage in [*stages, *offloaded]}
    expected |= {f"{stage} fp32, bf16 sums": 258 for stage in ("zero 0", "zero 2")}
    expected |= {f"{stage} fp16, fp16 sums": 258 for stage in stages}
    assert sums == expected
    assert {seen["after a drop"] for seen in found.values()} <= {2, None}
    unused = {case for case, seen in found.items() if any("is not used" in line for line in seen["said"])}
    assert unused == {"zero 0 fp32, bf16 sums", "zero 2 fp32, bf16 sums"}


WHOLE = [
    "zero 0",
    "zero 2",
    "zero 3",
    "lora zero 2",
    "lora zero 3",
    "tp zero 1",
    "tp zero 3",
    "lora tp zero 1",
    "lora tp zero 3",
]


@pytest.fixture(scope="module")
def gathered(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("whole")
    model = write_model(folder / "tiny")
    Runs(folder, folder, folder).run("two", "whole_ranks.py", model, folder)
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    return {way: torch.load(folder / f"{way}.pt") | {"start": start} for way in WHOLE}


@pytest.mark.parametrize("way", WHOLE)
def test_gathered_weights_are_those_of_one_process(gathered, way):
    """As the files of the model would hold them; what was announced before is what came; an iteration that was broken
    off leaves nothing behind."""
    result = gathered[way]
    found, expected = result["found"], result["expected"]
    assert found.keys() == expected.keys()
    trained = "model.layers.0.self_attn.q_proj.weight"
    assert (found[trained] - result["start"][trained]).abs().max() > 1e-3
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
        assert torch.equal(found[name], result["again"][name]), name
    assert result["announced"] == [(name, tensor.dtype, tensor.shape) for name, tensor in found.items()]
    assert result["same names"]


@pytest.mark.parametrize("way", WHOLE)
def test_no_more_is_gathered_at_once_than_allowed(gathered, way):
    """20,000 bytes are a few of the tiny model's tensors; its largest has 64 · 32 · 4 = 8,192, so none is alone."""
    if "zero 3" in way:
        assert 10_000 < gathered[way]["largest"] <= 20_000
    else:
        assert gathered[way]["largest"] == 0
    assert gathered[way]["gathered for weight_shapes"] == 0


@pytest.mark.parametrize("way", [way for way in WHOLE if way.startswith("lora")])
def test_an_adapter_is_had_without_its_base(gathered, way):
    """Its parameters alone are gathered: 4 bytes for each number. Ranks that share layers have it whole too."""
    found, expected = gathered[way]["apart"], gathered[way]["apart alone"]
    for part in ("base", "adapter"):
        assert found[part].keys() == expected[part].keys()
        for name, tensor in expected[part].items():
            torch.testing.assert_close(found[part][name], tensor, atol=1e-5, rtol=1e-4, msg=name)
    assert all(tensor.any() for tensor in found["adapter"].values()), "B has left 0"
    size = 4 * sum(tensor.numel() for tensor in found["adapter"].values())
    if "tp" in way:  # each rank gathers its part of what is cut
        assert found["gathered"] < size
    else:
        assert found["gathered"] == (size if "zero 3" in way else 0)


@pytest.mark.parametrize("way", WHOLE)
def test_a_probe_sees_the_same_policy_however_it_is_shared_out(gathered, way):
    assert gathered[way]["probe"] == pytest.approx(gathered[way]["probe alone"], abs=1e-4)


@pytest.fixture(scope="module")
def memory(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("memory")
    Runs(folder, folder, folder).run("two", "memory_ranks.py", folder / "out.json")
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", range(3))
def test_ranks_begin_a_step_again_when_one_runs_out_of_memory(memory, stage, where):
    """One of two ranks has gradients of a micro-batch when the next does not fit. Stage 2 adds gradients up during a
    backward, which the other rank goes on with: the one that failed does its part of these sums with nothing. Metrics
    and weights are those of ranks with room."""
    ran = memory[f"zero {stage} {where}"]
    assert ran["overflows"] == [11]
    assert ran["gap"] < 1e-5
    for tight, roomy in zip(ran["tight"], ran["roomy"], strict=True):
        for name, value in roomy.items():
            if name != "critic_clip_ratio":  # a count of values on either side of an edge
                assert tight[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_ranks_that_cannot_begin_again_say_why(memory):
    assert "compute every layer together" in memory["zero 3"]
    assert "--ds.adam_offload" in memory["offload"]


def test_neighbours_share_samples_and_the_nearest_of_them_layers(tmp_path):
    """Rank = (share · context + place in the stream) · tensor + part of the layers. Every share speaks once."""
    file = tmp_path / "out.json"
    run_ranks(4, [str(SUPPORT / "share_ranks.py"), str(file)], cwd=tmp_path, said=tmp_path / "said.txt", environment={})
    found = json.loads(file.read_text())
    by_two = {"count": 2, "index": [0, 0, 1, 1], "gathered": [[0, 10]] * 4}
    all_say = {"main": [True, False, False, False], "agreed": [3] * 4}
    assert found["tensor"] == found["context"] == by_two | all_say
    assert found["both"] == {"count": 1, "index": [0] * 4, "gathered": [[0]] * 4} | all_say
    assert found["neither"] == {"count": 4, "index": [0, 1, 2, 3], "gathered": [[0, 10, 20, 30]] * 4} | all_say
    assert found["layers"] == [[0, 1], [0, 1], [2, 3], [2, 3]]


EXPERTS = [
    "qwen3_moe, checkpointing",
    "qwen2_moe",
    "gpt_oss",
    "mixtral, one by one",
    "mixtral, one by one, reentrant",
]


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("experts")
    Runs(folder, folder, folder).run("two", "expert_ranks.py", folder / "out.json")
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("way", EXPERTS)
def test_experts_that_only_one_rank_has_tokens_for_get_the_gradient_of_one_process(experts, way):
    """ZeRO-3 gathers a block of experts whole where they are modules of their own, which a rank calls or not."""
    found = experts[way]
    assert found["gap"] < 1e-5
    assert found["reached by one"] > 0
    assert found["reached by none"] > 0
    if found["separate"]:
        assert set(found["blocks"]) <= set(found["leaves"])
    if way == "gpt_oss":  # its blocks are called once for each sequence, which DeepSpeed does not expect of a leaf
        assert found["leaves"] == []
    assert len(found["blocks"]) == (2 if way == "qwen2_moe" else 3)  # its first layer is dense


def test_ranks_that_would_wait_for_each_other_are_refused(experts):
    assert "--actor.gradient_checkpointing_reentrant" in experts["refused"]


TILED = ["zero 2", "zero 3", "zero 3, checkpointing", "zero 3, reentrant", "zero 3, lora", "tensor parallel"]


@pytest.fixture(scope="module")
def tiled(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("tiled")
    Runs(folder, folder, folder).run("two", "tiled_ranks.py", folder / "out.json")
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("way", TILED)
def test_ranks_of_which_one_has_a_long_sequence_in_tiles_train_as_without(tiled, way):
    """Ranks have different numbers of tiles, and do everything together as often and in the same order."""
    assert tiled[way]["gap"] < 1e-5
    ours, theirs = tiled[way]["tiles"]
    assert ours > 0
    assert (ours == theirs) is (way == "tensor parallel")
