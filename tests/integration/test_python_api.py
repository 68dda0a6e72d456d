"""`train_rl` and its like, as programs and notebooks call them: in one process, several times, beside an event loop."""

import asyncio
import gc
import logging
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from patience import patience

import openrlhf
from openrlhf import ConfigError, RLConfig, RunError, StopTraining

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).resolve().parents[2]

SCALE = 0.5
"""A variable that the reward uses."""


def half_marks(queries, prompts, labels):
    return [SCALE for _ in queries]


def broken(queries, prompts, labels):
    return 1 / 0


@pytest.fixture
def settings(inputs, tmp_path, monkeypatch):
    """Two steps of four prompts, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return {
        "actor.model_name_or_path": inputs.model,
        "data": {"max_len": 16, "label_key": "label"},
        "algo": {"advantage": {"estimator": "reinforce_baseline"}, "kl.init_coef": 0},
        "rollout": {"batch_size": 4, "n_samples_per_prompt": 2, "max_new_tokens": 4},
        "train.batch_size": 8,
        "vllm.num_engines": 0,
        "logger.run_dir": tmp_path / "run",
    }


def handlers():
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}


def test_a_run_beside_an_event_loop_gives_everything_back(inputs, settings, tmp_path):
    from openrlhf.models.policy import Policy

    steps, evaluations = [], []
    others = weakref.WeakSet(thing for thing in gc.get_objects() if isinstance(thing, Policy))  # of other tests
    before = handlers(), list(logging.getLogger().handlers), logging.getLogger().level

    async def cell():
        beside = asyncio.create_task(asyncio.sleep(0, "goes on"))
        result = openrlhf.train_rl(
            settings,
            reward=half_marks,
            data=inputs.records,
            eval=inputs.records[:2],
            on_step=lambda step, metrics: steps.append((step, metrics["reward"])),
            on_evaluation=lambda step, metrics: evaluations.append((step, metrics["eval_sorting_mean"])),
            **{"eval.at_start": True, "eval.n_samples_per_prompt": 1},
        )
        assert asyncio.current_task() is not None
        return result, await beside

    result, beside = asyncio.run(cell())
    assert beside == "goes on"
    assert (handlers(), list(logging.getLogger().handlers), logging.getLogger().level) == before
    assert not any(isinstance(thing, Policy) and thing not in others for thing in gc.get_objects())

    assert steps == [(1, 0.5), (2, 0.5)]
    assert evaluations == [(0, 0.5), (2, 0.5)]
    assert (result.steps, result.ended_early, result.metrics["reward"]) == (2, None, 0.5)
    assert result.evaluation["eval_sorting_pass1"] == 0.5
    assert result.best == ("eval_sorting_pass1", 0.5, 0)
    assert result.model_dir == tmp_path / "run" / "model"
    assert (result.model_dir / "config.json").is_file()
    assert [record["step"] for record in result.history()] == [1, 2]
    assert {episode["reward"] for episode in result.rollouts(-1)} == {0.5}
    assert result.chart().svg.startswith("<svg")
    with pytest.raises(KeyError, match=r"no metric 'rewrd'; it has .*reward"):
        result.chart("rewrd")

    # The folder has all that the run was made of: the command repeats it.
    words = ["--config", str(result.run_dir / "config.yaml"), "--print_config"]
    done = subprocess.run(
        [sys.executable, "-m", "openrlhf.cli.main", "rl", *words], capture_output=True, text=True, check=True
    )
    assert f"remote_url: {result.run_dir}/inputs/half_marks.py" in done.stdout
    assert "# def half_marks" in (result.run_dir / "inputs" / "half_marks.py").read_text()


def test_a_callback_ends_a_run_that_another_call_continues(inputs, settings):
    settings |= {"ckpt.save_steps": 100, "ckpt.path": "checkpoints", "train.num_episodes": 2}
    given = {"reward": half_marks, "data": inputs.records}

    def enough(step, metrics):
        if step == 3:
            raise StopTraining("good enough")

    first = openrlhf.train_rl(settings, **given, on_step=enough)
    assert (first.steps, first.ended_early) == (3, "good enough")
    assert (first.model_dir / "model.safetensors").is_file()
    second = openrlhf.train_rl(settings | {"ckpt.load_enable": True}, **given, on_step=lambda step, _: step == 4)
    assert (second.steps, second.ended_early) == (4, None)
    assert second.run_dir == first.run_dir
    assert [record["step"] for record in second.history()] == [1, 2, 3, 4]


def test_an_interrupt_says_how_to_go_on_and_leaves_the_process_alone(inputs, settings):
    settings |= {"ckpt.save_steps": 1, "ckpt.path": "checkpoints"}
    before = handlers()

    def interrupt(step, metrics):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="interrupted; there is no checkpoint yet"):
        openrlhf.train_rl(settings, reward=half_marks, data=inputs.records, on_step=interrupt)
    assert handlers() == before


def test_errors_are_those_of_the_command(inputs, settings, tmp_path):
    given = {"reward": half_marks, "data": inputs.records}
    for arguments, problem in (
        (given | {"train": {"batchsize": 8}}, "--train.batchsize is unknown; did you mean --train.batch_size?"),
        (given | {"rollout": {"top_p": 2}}, "--rollout.top_p 2.0: must be"),
        (given | {"data": {"max_len": 16}}, "--data.prompt_dataset is missing"),
        (given | {"data": [3]}, r"data\[0\] must be a dict, got int"),
        (given | {"data": [{"input": object()}]}, r"data\[0\] must hold what JSON can"),
        (given | {"data": []}, "data has no records"),
        (given | {"reward": 1}, "reward must be a function, a Python file or a URL, got int"),
        (given | {"agent": 1}, "agent must be a class or a Python file, got int"),
        (given | {"on_step": 1}, "on_step must be a plain function"),
        ({"data": inputs.records}, "no reward: give --reward.remote_url"),
        (given | {"reward": lambda *_, file=sys.stdout: [0.0]}, "reward: <lambda> cannot be sent"),
    ):
        with pytest.raises(ConfigError, match=problem):
            openrlhf.train_rl(settings, **arguments)
    with pytest.raises(ConfigError, match="must be a SFTConfig or settings by name, got RLConfig"):
        openrlhf.train_sft(RLConfig())
    assert not (tmp_path / "run" / "config.yaml").exists()

    with pytest.raises(RunError, match=rf"{__file__}:\d+ \(in broken\): ZeroDivisionError") as caught:
        openrlhf.train_rl(settings, reward=broken, data=inputs.records)
    assert "\n" not in str(caught.value)


PAIRS = [{"prompt": f"{i}>", "chosen": "123", "rejected": "321"} for i in range(4)]


@pytest.mark.parametrize(
    ("train", "records", "more"),
    [
        ("train_sft", [{"input": f"{i}>", "output": "123"} for i in range(4)], {"data.output_key": "output"}),
        ("train_rm", PAIRS, {"data.prompt_key": "prompt"}),
        ("train_dpo", PAIRS, {"data.prompt_key": "prompt"}),
    ],
)
def test_supervised_training(train, records, more, inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []
    result = getattr(openrlhf, train)(
        {"model.model_name_or_path": inputs.model, "train": {"batch_size": 2, "micro_batch_size": 2, "max_epochs": 2}},
        data=records,
        eval=records[:2],
        on_step=lambda step, metrics: seen.append(step) or step < 3,
        **{"data.max_len": 16, **more},
    )
    assert (seen, result.steps, result.ended_early) == ([1, 2, 3], 3, "on_step returned False")
    assert result.best.step == 2  # the end of the first epoch
    assert result.model_dir.parent == result.run_dir
    assert result.model_dir.parent.parent == tmp_path / "runs"
    assert any(result.model_dir.glob("*.safetensors"))


def test_the_notebook_runs(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    notebook = nbformat.read(REPOSITORY / "examples" / "notebook.ipynb", as_version=4)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    parameters.source = "steps = 1\nwarm_up_until = 0.0"
    folder = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=int(patience(300)), resources=folder, kernel_name="python3").execute()
    said = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    display, result, chart = (output["data"] for outputs in said for output in outputs if "data" in output)
    assert "step 1/1" in display["text/plain"]
    assert "<progress" in display["text/html"]
    assert "notebook" in result["text/html"]
    assert "data:image/svg+xml" in chart["text/html"]
    training = next(outputs for outputs in said if any(output.get("data") is display for output in outputs))
    assert [output for output in training if output.get("name") == "stderr"] == []
