"""The supervised loop: when it does what, what it logs, and that it continues where it stopped."""

import copy
import math
import signal

import pytest
import torch
from small_supervised import CPU, Samples, make_backend, make_policy, make_trainer, random_pairs
from thread_ranks import together

from openrlhf.backends.state import LeftOut, NotFiniteError
from openrlhf.config.models import DPOModelSection
from openrlhf.observability.metrics import Metrics, PhaseClock
from openrlhf.trainers.dpo import DPOObjective
from openrlhf.trainers.preferences import Reference
from openrlhf.trainers.sft import SFTObjective
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss, RunningMeans, WholeSet
from openrlhf.utils.interrupts import Stopped, StopRequest

EXAMPLES = Samples(p.chosen for p in random_pairs(8))


class FakeBackend:
    """A module with one number, and a list of what was asked of it."""

    def __init__(self):
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.events = []
        self.learning_rate = 0.5
        self.left_out = None
        self.refused = ()

    def backward(self, loss):
        self.events.append(f"backward {float(loss):g}")

    def step(self):
        self.events.append("step")
        self.left_out = LeftOut("its gradient is nan") if self.events.count("step") in self.refused else None
        if self.left_out:
            return math.nan
        self.learning_rate /= 2
        return 3.0

    def scalar_state(self):
        return {"rate": self.learning_rate}

    def tensor_state(self):
        return iter(())

    def load(self, numbers, tensors):
        self.learning_rate = numbers["rate"]


class FakeObjective:
    """The loss of sample i is i; of a step, the sum over its samples divided by their number."""

    names = MetricNames(evaluation={"loss": "eval_loss"}, smoothed={"loss": "loss_mean"})
    lengths = (10,) * 8

    def __init__(self, events):
        self.events = events

    def begin(self, module, batch: Batch):
        self.events.append(f"{'train' if module.training else 'eval'} {list(batch.samples)}")

        def compute_loss(micro):
            metrics = Metrics()
            metrics.mean("loss", sum(micro), len(micro))
            return MicroBatchLoss(torch.tensor(sum(micro) / len(batch.samples)), metrics)

        return compute_loss

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.events.append("loaded")


class Drawer:
    """A checkpointer that keeps everything it is given."""

    def __init__(self, trainer, content=None):
        self.saved, self._backend, self._content = {}, trainer.backend, content
        trainer.checkpointer = self

    def save(self, step, state, *, best=False):
        tensors = {name: tensor.clone() for name, tensor in self._backend.tensor_state()}
        self.saved[step] = copy.deepcopy((state, self._backend.scalar_state())), tensors

    def load(self, take_up):
        if self._content is None:
            return None
        (state, numbers), tensors = self._content
        self._backend.load(numbers, tensors)
        take_up(state)
        return state


def fake_trainer(*, steps=8, evaluation=True, **periods):
    backend = FakeBackend()
    objective = FakeObjective(backend.events)
    return make_trainer(
        backend,
        objective,
        batch_size=2,
        budget=10,
        steps=steps,
        evaluation=FakeObjective(backend.events) if evaluation else None,
        **periods,
    )


def test_a_step_is_every_micro_batch_and_one_optimizer_step():
    """Samples 2 and 3 in two micro-batches: 2/2, then 3/2."""
    trainer, _ = fake_trainer(evaluation=False)
    metrics = trainer.step(WholeSet([2, 3], [[2], [3]])).values()
    assert trainer.backend.events == ["train [2, 3]", "backward 1", "backward 1.5", "step"]
    assert (metrics["loss"], metrics["lr"], metrics["grad_norm"]) == (2.5, 0.5, 3.0)
    assert metrics["perf/tokens_per_second"] == pytest.approx(20 / metrics["timing/step_total"])


def test_tokens_per_second_count_the_time_of_steps_alone():
    """Samples of 10 tokens, two in a step of 2 s. The 100 s of loading a checkpoint and 50 s of an evaluation do not
    count, in the first step or in any other."""
    now = [0.0]
    trainer, memory = fake_trainer(steps=3, eval_every=1)
    trainer.clock = PhaseClock(now=lambda: now[0])
    taken, load, evaluate = trainer.backend.step, trainer.checkpointer.load, trainer.evaluate

    def after(seconds, function):
        def slow(*args, **kwargs):
            now[0] += seconds
            return function(*args, **kwargs)

        return slow

    trainer.backend.step = after(2.0, taken)
    trainer.checkpointer.load = after(100.0, load)
    trainer.evaluate = after(50.0, evaluate)
    trainer.fit()
    assert [(s["timing/step_total"], s["perf/tokens_per_second"]) for s in memory.of("train")] == [(2.0, 10.0)] * 3


def test_supervised_trainer_logs_metrics_by_their_names():
    """Losses 0.5, 2.5, 4.5; their running mean with decay 0.9 is (0.9·0.5 + 2.5) / 1.9 after the second."""
    trainer, memory = fake_trainer(steps=3)
    trainer.fit()
    steps = memory.of("train")
    assert [s["global_step"] for s in steps] == [1, 2, 3]
    assert [s["loss"] for s in steps] == [0.5, 2.5, 4.5]
    assert [s["lr"] for s in steps] == [0.5, 0.25, 0.125]
    assert steps[0]["loss_mean"] == 0.5
    assert steps[1]["loss_mean"] == pytest.approx((0.9 * 0.5 + 2.5) / 1.9)


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        (8, None, [4, 8]),
        (8, 3, [3, 4, 6, 8]),
        (8, 4, [4, 8]),
        (6, 5, [4, 5, 6]),  # a limit of six steps ends the run in the middle of an epoch
    ],
)
def test_evaluation_comes_at_its_period_and_at_the_end_of_epochs_and_of_the_run(steps, every, expected):
    """Four steps an epoch. No step is evaluated twice."""
    trainer, memory = fake_trainer(steps=steps, eval_every=every)
    last = trainer.fit()
    assert [r["step"] for r in memory.of("eval")] == expected
    assert last == {"eval_loss": 3.5}, "the mean of 0 … 7"
    assert memory.of("eval")[0] == {"step": expected[0], "kind": "eval", "eval_loss": 3.5, "global_step": expected[0]}
    assert trainer.backend.events.count("eval [0, 1, 2, 3, 4, 5, 6, 7]") == len(expected)


def test_supervised_trainer_evaluates_nothing_without_evaluation_data():
    trainer, memory = fake_trainer(evaluation=False, eval_every=1)
    assert trainer.fit() == {}
    assert memory.of("eval") == []


def test_logging_may_be_sparse():
    trainer, memory = fake_trainer(log_every=3)
    trainer.fit()
    assert [r["step"] for r in memory.of("train")] == [3, 6]


def test_checkpoints_come_at_their_period_and_a_run_continues_from_one():
    trainer, memory = fake_trainer(save_every=3)
    drawer = Drawer(trainer)
    trainer.fit()
    assert list(drawer.saved) == [3, 6]

    resumed, continued = fake_trainer(save_every=3)
    Drawer(resumed, drawer.saved[3])
    resumed.fit()
    assert resumed.backend.events.count("loaded") == 1, "what is only measured has nothing to remember"
    timeless = [{k: v for k, v in r.items() if "/" not in k} for r in memory.records]
    again = [{k: v for k, v in r.items() if "/" not in k} for r in continued.records]
    assert again == [r for r in timeless if r["step"] > 3]


class Asked(StopRequest):
    """As many steps are over when the signal comes; None: it never does."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def accept(self):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.asked = signal.SIGUSR1
        return super().accept()


def test_asked_to_stop_it_saves_and_the_next_run_makes_up_for_the_evaluation():
    """Four steps are an epoch, after which an evaluation is due: the run that goes on begins with it."""
    whole, memory = fake_trainer(save_every=3)
    whole.fit()
    trainer, before = fake_trainer(save_every=3)
    drawer, trainer.stop = Drawer(trainer), Asked(4)
    with pytest.raises(Stopped) as end:
        trainer.fit()
    assert end.value.by == signal.SIGUSR1
    assert list(drawer.saved) == [3, 4]

    resumed, after = fake_trainer(save_every=3)
    Drawer(resumed, drawer.saved[4])
    resumed.fit()
    records = [[{k: v for k, v in r.items() if "/" not in k} for r in m.records] for m in (before, after, memory)]
    assert records[0] + records[1] == records[2]


def test_stop_request_to_one_rank_stops_all_after_the_same_step():
    def run(ranks):
        trainer, _ = fake_trainer()
        trainer.ranks, trainer.stop = ranks, Asked(2 if ranks.index == 1 else None)
        drawer = Drawer(trainer)
        try:
            trainer.fit()
        except Stopped as stop:
            return stop.by, list(drawer.saved)

    assert together(3, run) == [(signal.SIGUSR1, [2])] * 3


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_resumed_run_ends_with_the_same_weights(kind):
    def make():
        policy = make_policy(hidden=16)
        if kind == "sft":
            objective = SFTObjective(EXAMPLES, device=CPU)
        else:
            reference = Reference(make_policy(seed=1, hidden=16), device=CPU)
            objective = DPOObjective(random_pairs(8), DPOModelSection(beta=0.1), reference=reference, device=CPU)
        return make_trainer(make_backend(policy), objective, batch_size=4, budget=60, steps=6, save_every=3)[0]

    straight = make()
    drawer = Drawer(straight)
    straight.fit()
    resumed = make()
    Drawer(resumed, drawer.saved[3])
    resumed.fit()
    for one, other in zip(straight.backend.module.parameters(), resumed.backend.module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_running_means_forget():
    """ρ = 0.5 of 4, 0, 0: 4; 2/1.5; 1/1.75."""
    means = RunningMeans(decay=0.5)
    assert [means.update("x", v) for v in (4.0, 0.0, 0.0)] == pytest.approx([4.0, 2 / 1.5, 1 / 1.75])
    assert means.update("y", 7.0) == 7.0


class NotedWarnings:
    def __init__(self):
        self.notes = {}

    def after(self, step, values, notes=()):
        if notes:
            self.notes[step] = list(notes)


def test_a_step_that_was_left_out_is_counted_named_and_in_no_mean():
    """Of steps 1, 2, 3 with losses 0.5, 2.5, 4.5 the second is left out: the rate stands still, and the running mean
    after the third is (0.9·0.5 + 4.5) / 1.9."""
    trainer, memory = fake_trainer(steps=3)
    trainer.backend.refused, trainer.warnings = (2,), NotedWarnings()
    trainer.fit()
    first, second, third = memory.of("train")
    assert not {"loss", "loss_mean", "grad_norm"} & set(second)
    assert second["skipped_steps"] == 1.0
    assert "skipped_steps" not in first
    assert [step["lr"] for step in (first, second, third)] == [0.5, 0.25, 0.25]
    assert third["loss_mean"] == pytest.approx((0.9 * 0.5 + 4.5) / 1.9)
    assert trainer.warnings.notes == {2: ["an optimizer step was left out: its gradient is nan"]}


def test_too_many_in_a_row_end_the_run_and_others_do_not():
    trainer, _ = fake_trainer(steps=8)
    trainer.backend.refused = (1, 2, 3, 4, 6, 7, 8)
    trainer.fit()
    trainer, _ = fake_trainer(steps=8)
    trainer.backend.refused = (2, 3, 4, 5, 6)
    with pytest.raises(
        NotFiniteError, match=r"^5 optimizer steps in a row were left out \(--train.max_skipped_steps\)"
    ):
        trainer.fit()
    assert trainer.steps_done == 5


def test_the_samples_whose_loss_is_not_finite_are_named():
    trainer, _ = fake_trainer(steps=1)
    trainer.backend.refused, trainer.warnings = (1,), NotedWarnings()
    trainer.objective.begin = lambda module, batch: (
        lambda micro: MicroBatchLoss(torch.tensor(math.nan if 1 in micro else 1.0), Metrics())
    )
    trainer.fit()
    assert trainer.warnings.notes[1] == [
        "an optimizer step was left out: its gradient is nan; not finite: the loss of sample 1 of the data set"
    ]
