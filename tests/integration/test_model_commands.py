"""`openrlhf eval`, `chat` and `export` on tiny models, as users call them."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from patience import patience

from openrlhf.cli import main as console

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    from openrlhf.checking.workbench import write_tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder)
    return folder


# ------------------------------------------------------------------------------------------------------- eval

REWARD = """
def reward_func(queries, prompts, labels):
    '''The first samples of a prompt are right, as many as its label says.'''
    right = int(labels[0])
    return [float(i < right) for i in range(len(queries))]
"""


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """2, 0 and 4 samples of 4 are right; the last prompt's reward fails."""
    monkeypatch.chdir(tmp_path)
    records = [{"input": f"prompt {label}", "label": label} for label in ("2", "0", "4", "x")]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (tmp_path / "reward.py").write_text(REWARD)
    words = ["--data", "data.jsonl", "--label_key", "label", "--max_len", "64", "--max_new_tokens", "4"]
    return [*words, "--reward", "reward.py"]


def test_eval_counts_by_hand(tiny, prompts, capfd, tmp_path):
    """pass@2 = (5/6 + 0 + 1) / 3 = 0.611."""
    assert console.main(["eval", str(tiny), *prompts, "--temperature", "0", "--output", "found.json"]) == 0
    said = capfd.readouterr()
    numbers = dict(re.findall(r"^(pass@\d|mean score|prompts|samples|failed) +([\d.]+)", said.out, re.MULTILINE))
    assert numbers == {
        "pass@1": "0.500", "pass@2": "0.611", "pass@4": "0.667", "mean score": "0.500",
        "prompts": "4", "samples": "12", "failed": "4",
    }  # fmt: skip
    assert "4 samples failed and are in no number above, such as: record 4 of data.jsonl" in said.out
    assert f"{tmp_path}/reward.py:4 (in reward_func): ValueError" in said.out
    found = json.loads(Path("found.json").read_text())
    assert found["complete"]
    assert found["engine"] == "embedded"
    assert found["results"]["pass"]["2"]["value"] == pytest.approx(11 / 18)
    samples = {entry["label"]: entry["samples"] for entry in found["prompts"]}
    assert [sample["score"] for sample in samples["2"]] == [1, 1, 0, 0]
    assert len({sample["text"] for sample in samples["2"]}) == 1  # greedy
    assert [sample["outcome"] for sample in samples["x"]] == ["failed"] * 4


def test_an_interrupted_eval_shows_what_is_there(tiny, prompts, capfd, monkeypatch):
    from openrlhf.runs import measuring

    monkeypatch.setattr(measuring, "SAMPLES_AT_ONCE", 1)  # one prompt after the other
    shown = measuring._Progress.show

    def show(self):
        shown(self)
        if len(self._measured.groups) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(measuring._Progress, "show", show)
    assert console.main(["eval", str(tiny), *prompts, "--n", "2", "--output", "-"]) == 130
    said = capfd.readouterr()
    assert "interrupted: 2 of 4 prompts" in said.err
    found = json.loads(said.out)
    assert not found["complete"]
    assert found["results"]["pass"]["1"]["value"] == 0.5


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (["{tiny}", "--data", "data.jsonl"], 2, "openrlhf eval: error: what judges the samples?"),
        (["{tiny}", "{prompts}", "--k", "8"], 2, "--k 8: pass@k needs k samples of each prompt or more, and --n is 4"),
        (["{tiny}", "{prompts}", "--actor.adam.lr", "1"], 2, "--actor.adam.lr is about training"),
        (["{tiny}", "{prompts}", "--rollout_batch_size", "8"], 2, "--rollout_batch_size is about training"),
        (["{tiny}", "{prompts}", "--vllm.enforce_eager", "--engine", "embedded"], 2, "--engine is embedded"),
        (["{tiny}", "{prompts}", "--rollout.temperature", "1"], 2, "--rollout.temperature: give --temperature here"),
        (["{tiny}", "{prompts}", "--max_tokenz", "1"], 2, "--max_tokenz is unknown; did you mean"),
        (["./nowhere", "{prompts}"], 1, "error: MODEL ./nowhere: no such folder"),
        (["{tiny}", "{prompts}", "--data.input_key", "nothing"], 1, "error: --data, record 1 of data.jsonl"),
    ],
)
def test_eval_says_what_is_wrong(words, status, problem, tiny, prompts, capfd):
    given = [part for word in words for part in (prompts if word == "{prompts}" else [word.format(tiny=tiny)])]
    assert console.main(["eval", *given]) == status
    assert problem in capfd.readouterr().err


# ------------------------------------------------------------------------------------------------------- chat


def test_a_chat_in_a_pipe(tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [
        "hello",
        "/tokens",
        "/undo",
        "/undo",
        "/system be brief",
        "/temperature hot",
        "/temperature 0",
        '"""',
        "two",
        "lines",
        '"""',
        "one \\",
        "more",
        "/save talk.json",
        "/reset",
        "/tokens",
        "/nonsense",
        "/quit",
        "never asked",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert console.main(["chat", str(tiny), "--max_new_tokens", "5", "--seed", "3"]) == 0
    said = capfd.readouterr()
    answer, head, *rest = said.out.splitlines()
    assert head.split() == ["id", "log-prob", "prob", "token"]
    rows = [re.fullmatch(r" *(\d+) +(-\d+\.\d+) +[\d.]+%  ('.*')", row) for row in rest[:5]]
    assert "".join(eval(row[3]) for row in rows) == answer
    count, _, total = rest[5].partition(" tokens, log-prob ")
    assert (int(count), float(total)) == (5, pytest.approx(sum(float(row[2]) for row in rows), abs=0.003))
    assert len(rest) == 6 + 2  # two more answers, and nothing but answers and tokens
    talk = json.loads(Path("talk.json").read_text())
    assert [message["role"] for message in talk] == ["system", "user", "assistant", "user", "assistant"]
    assert (talk[0]["content"], talk[1]["content"], talk[3]["content"]) == ("be brief", "two\nlines", "one \nmore")
    for line in (
        "the last question and its answer are taken back",
        "there is nothing to take back",
        "error: /temperature needs a number, got 'hot'",
        "5 messages are in talk.json",
        "there is no answer yet",
        "there is no /nonsense",
    ):
        assert line in said.err


class Shell:
    """A command on a terminal of its own."""

    def __init__(self, *words: str) -> None:
        self.text = ""
        self._ours, theirs = pty.openpty()
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "openrlhf.cli.main", *words],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(theirs)

    def send(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C at a prompt, once the command waits there: between writing a prompt and waiting for a key Python's
        `input` would take notice of it with the next key only, and no person is that fast."""
        process, asleep, end = psutil.Process(self.process.pid), 0, time.monotonic() + patience(60)
        while asleep < 5 and time.monotonic() < end:
            asleep = asleep + 1 if process.status() == psutil.STATUS_SLEEPING else 0
            time.sleep(0.1)
        self.send("\x03")

    def wait_for(self, pattern: str, seconds: float = 120.0) -> None:
        """Until it has written something of the kind; what was before it is forgotten."""
        end = time.monotonic() + patience(seconds)
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end, (pattern, self.text)
            if select.select([self._ours], [], [], 0.5)[0]:
                self.text += os.read(self._ours, 4096).decode(errors="replace")
        self.text = self.text[found.end() :]


def test_a_chat_on_a_terminal(tiny):
    """Ctrl-C stops an answer that would go on for long; after it one more leaves."""
    shell = Shell("chat", str(tiny), "--max_len", "30000", "--temperature", "0")
    try:
        shell.wait_for("> ")
        shell.send("/max_tokens 3\n")
        shell.wait_for("max_tokens 3\r\n> ")
        shell.send("hi\n")
        shell.wait_for(r"limit of tokens is reached\)\r\n> ")
        shell.send("/max_tokens 29000\n")
        shell.wait_for("max_tokens 29000\r\n> ")
        shell.send("go on\n")
        shell.wait_for(r"go on\r\n.{3}")
        shell.send("\x03")
        shell.wait_for(r"\(stopped; Ctrl-C once more leaves\)\r\n> ")
        shell.send("/tokens\n")
        shell.wait_for(r"tokens, log-prob .*\r\n> ")
        shell.interrupt()
        shell.wait_for(r"Ctrl-C once more, or /quit, leaves\)\r\n> ")
        shell.interrupt()
        assert shell.process.wait(patience(60)) == 130
    finally:
        shell.process.kill()
        shell.process.wait()


# ----------------------------------------------------------------------------------------------------- export


@pytest.fixture(scope="module")
def lora_run(tiny, tmp_path_factory):
    """Three steps with an adapter; a checkpoint after two of them."""
    import openrlhf

    folder = tmp_path_factory.mktemp("lora")
    records = [{"input": f"{i} + 1", "output": str(i + 1)} for i in range(6)]
    return openrlhf.train_sft(
        {
            "model.model_name_or_path": tiny,
            "ds.lora": {"rank": 2, "alpha": 4},
            "adam.lr": 1e-2,
            "train": {"batch_size": 2, "micro_batch_size": 2, "max_epochs": 1},
            "data": {"max_len": 64, "output_key": "output"},
            "ckpt": {"save_steps": 2, "path": str(folder / "checkpoints")},
            "logger": {"run_dir": folder / "run", "wandb": {"run_name": "private"}},
        },
        data=records,
        eval=records[:2],
    )


def test_an_adapter_is_exported_merged_and_kept(tiny, lora_run, tmp_path, capfd):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert console.main(["export", str(lora_run.run_dir), "--to", str(tmp_path / "merged")]) == 0
    assert capfd.readouterr().out == f"{tmp_path}/merged\n"
    kept = tmp_path / "kept"
    words = ["--adapter", "keep", "--base_model", "org/tiny"]
    assert console.main(["export", str(lora_run.run_dir), "--to", str(kept), *words]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), kept)
    ids = AutoTokenizer.from_pretrained(tmp_path / "merged")("3 + 1", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, rtol=1e-4, atol=1e-4)
        assert (merged(ids).logits - AutoModelForCausalLM.from_pretrained(tiny)(ids).logits).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(kept).chat_template
    assert json.loads((kept / "adapter_config.json").read_text())["base_model_name_or_path"] == "org/tiny"

    front, text = (kept / "README.md").read_text().split("---\n")[1:]
    assert yaml.safe_load(front) == {
        "base_model": "org/tiny", "base_model_relation": "adapter", "library_name": "peft",
        "pipeline_tag": "text-generation", "tags": ["openrlhf", "sft", "lora"],
    }  # fmt: skip
    assert "It is the end of the run after 3 steps; the seed was 42." in text
    assert "| `--ds.lora.rank` | `2` |" in text
    assert "![Curves of the training: gpt_loss, eval gpt_loss](curves.svg)" in text
    assert (kept / "curves.svg").read_text().startswith("<svg")
    command = text.split("```bash\n")[1].split("```")[0].replace("\\\n", "")
    assert "--data.dataset train.jsonl" in command
    for folder in (kept, tmp_path / "merged"):
        for file in (path for path in folder.iterdir() if path.suffix in (".json", ".md", ".svg")):
            assert str(tiny.parent) not in file.read_text(), file
            assert "private" not in file.read_text(), file

    from openrlhf.config import parse

    assert parse("train_sft", command.split()[2:]).ds.lora.rank == 2


def test_a_checkpoint_is_exported_and_an_adapter_is_chatted_with(lora_run, tmp_path, capfd, caplog, monkeypatch):
    checkpoints = lora_run.run_dir.parent / "checkpoints"
    assert console.main(["export", str(checkpoints / "global_step2"), "--to", str(tmp_path / "two")]) == 0
    card = (tmp_path / "two" / "README.md").read_text()
    assert "It is a checkpoint of the run after 2 steps" in card
    capfd.readouterr()

    caplog.set_level("INFO")
    monkeypatch.setattr("sys.stdin", io.StringIO("3 + 1\n"))
    assert console.main(["chat", str(lora_run.model_dir), "--temperature", "0", "--max_new_tokens", "4"]) == 0
    said = capfd.readouterr()
    assert said.out.strip("\n") or "limit" in said.err
    assert "is an adapter: it is merged into its base" in caplog.text


@pytest.mark.parametrize("adapter", ["keep", "merge"])
def test_the_adapter_of_a_reward_model_is_exported(adapter, tiny, tmp_path, monkeypatch):
    import openrlhf

    monkeypatch.chdir(tmp_path)
    run = openrlhf.train_rm(
        {"model.model_name_or_path": tiny, "ds.lora.rank": 2, "train": {"batch_size": 2, "micro_batch_size": 2}},
        data=[{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(2)],
        **{"data.max_len": 64, "data.prompt_key": "prompt"},
    )
    assert console.main(["export", str(run.run_dir), "--to", "out", "--adapter", adapter]) == 0
    card = Path("out/README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "AutoModelForSequenceClassification.from_pretrained(" in card


def test_export_says_what_is_wrong(tiny, lora_run, tmp_path, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.yaml").write_text("train: {seed: 1}\n")
    for source, target, status, problem in (
        (lora_run.run_dir, "full", 2, "there is something already; name another folder"),
        (tmp_path / "nowhere", "new", 1, f"error: there is no folder {tmp_path}/nowhere"),
        (tiny, "new", 1, "is neither the folder of a run, which has a config.yaml, nor a checkpoint"),
        (tmp_path / "unfinished", "new", 1, "has no model: the run has not ended. Name one of its checkpoints"),
    ):
        assert console.main(["export", str(source), "--to", str(tmp_path / target)]) == status
        assert problem in capfd.readouterr().err
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".new*"))
