"""What programs import: fast, typed, and a guest in their process."""

import asyncio
import signal
import subprocess
import sys

import pytest

import openrlhf
from openrlhf import ConfigError
from openrlhf.agents.user_agent import load_agent
from openrlhf.agents.user_calls import describe_error, load_module
from openrlhf.config.parser import configure
from openrlhf.runs.given import write_code, write_records
from openrlhf.trainers.callbacks import Callbacks, EndedEarly, StopTraining
from openrlhf.utils import interrupts
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from openrlhf.utils.event_loops import own_loops


def test_importing_the_names_imports_no_library():
    names = ", ".join(openrlhf.__all__)
    code = f"from openrlhf import {names}; import sys; assert not {{'torch', 'transformers', 'ray'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_names_are_those_that_are_documented():
    assert set(openrlhf.__all__) <= set(dir(openrlhf))
    with pytest.raises(AttributeError, match="has no attribute 'train_ppo'"):
        openrlhf.train_ppo  # noqa: B018


def test_settings_by_name_are_a_configuration():
    config = configure(
        "train_ppo_ray",
        {
            "actor": {"model_name_or_path": "m", "adam.lr": 1e-5},
            "data.prompt_dataset": "d.jsonl",
            "reward.remote_url": "r.py",
            "pretrain": "m",
            "reward": {"clip_range": (0, 1)},
        },
    )
    assert (config.actor.adam.lr, config.reward.clip_range) == (1e-5, (0.0, 1.0))
    over = configure("train_ppo_ray", {"train.seed": 7}, base=config)
    assert (over.train.seed, over.actor.adam.lr) == (7, 1e-5)
    for settings, problem in (
        ({"actor.adm.lr": 1}, "--actor.adm.lr is unknown; did you mean --actor.adam.lr?"),
        ({"actor": {"adam": 3}}, "--actor.adam is unknown"),
        ({"train.seed": {"x": 1}}, "--train.seed takes a value, not a mapping"),
        ({"train.seed": "x"}, "--train.seed: expected a whole number, got 'x'"),
        ({"ipo": True}, "--ipo belongs to openrlhf dpo, not to openrlhf rl"),
    ):
        with pytest.raises(ConfigError, match=problem.replace("?", r"\?")):
            configure("train_ppo_ray", settings, name="openrlhf rl")


def test_a_loop_inside_a_loop():
    """A kernel's loop stands still while a cell runs, and goes on afterwards."""

    async def cell():
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        with own_loops():
            assert asyncio._get_running_loop() is None
            with asyncio.Runner() as runner:
                assert runner.run(asyncio.sleep(0, "inside")) == "inside"
        assert (asyncio.current_task(), asyncio.get_running_loop()) == (task, loop)
        return await asyncio.sleep(0, "outside")

    assert asyncio.run(cell()) == "outside"
    with own_loops():
        assert asyncio.run(asyncio.sleep(0, "alone")) == "alone"


def test_no_signal_ends_a_process_that_is_not_the_runs_own():
    before = signal.getsignal(signal.SIGINT)
    with interrupts.handled(owns_process=False):
        interrupts.end_at_once_on_the_next(last=lambda: None)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_callbacks_end_a_training():
    told = []
    callbacks = Callbacks(on_step=lambda step, metrics: told.append((step, metrics)) or step < 2)
    callbacks.step(1, {"reward": 1.0})
    callbacks.check()
    callbacks.evaluation(1, {})
    callbacks.step(2, {"reward": 2.0})
    with pytest.raises(EndedEarly, match="on_step returned False"):
        callbacks.check()
    assert told == [(1, {"reward": 1.0}), (2, {"reward": 2.0})]

    def stop(step, metrics):
        raise StopTraining("enough")

    callbacks = Callbacks(on_evaluation=stop)
    callbacks.evaluation(0, {})
    assert callbacks.ended == "enough"

    async def later(step, metrics): ...

    for wrong in (3, later):
        with pytest.raises(ConfigError, match="on_step must be a plain function"):
            Callbacks(on_step=wrong)


def test_code_of_a_cell_becomes_a_file(tmp_path):
    """What `exec` defines in a namespace of `__main__` is as a notebook's cell defines it."""
    scope = {"__name__": "__main__", "scale": 3}
    exec(compile("def grade(queries):\n    return [scale / len(q) for q in queries]\n", "/cells/7.py", "exec"), scope)
    path = write_code(scope["grade"], tmp_path / "inputs", target="reward_func", given="reward")
    assert path == tmp_path / "inputs" / "grade.py"
    scope["scale"] = 5  # it was copied before
    function = load_module(path).reward_func
    assert function(["abc"]) == [1.0]
    with pytest.raises(ZeroDivisionError) as caught:
        function([""])
    inside = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # as a host sees it
    said = describe_error(inside, file=path)
    assert said == "/cells/7.py:2 (in grade): ZeroDivisionError: division by zero"

    again = write_code(lambda queries: 0, tmp_path, target="reward_func", given="reward", taken=["function"])
    assert again.name == "function_2.py"
    lock = __import__("threading").Lock()
    with pytest.raises(ConfigError, match=r"reward: <lambda> cannot be sent .*lock.*Make what it uses inside it"):
        write_code(lambda queries: lock, tmp_path, target="reward_func", given="reward")


class Once(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        pass

    async def step(self, states, **kwargs):
        return {"rewards": 1.0, "done": True}


class Agent(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Once)


def test_a_class_becomes_an_agent_file(tmp_path):
    path = write_code(Agent, tmp_path, target="AgentExecutor", given="agent")
    assert type(load_agent(path).executor).__name__ == "Agent"
    assert "# class Agent(MultiTurnAgentExecutor):" in path.read_text()


def test_records_become_a_file(tmp_path):
    path = write_records(({"input": f"{i} ü"} for i in range(2)), tmp_path, name="train", given="data")
    assert path.read_text(encoding="utf-8") == '{"input": "0 ü"}\n{"input": "1 ü"}\n'
