"""The four pipelines with an engine that can be trained and that notes the order of calls: when it is paused, put to
sleep, pushed to, resumed and evaluated."""

import asyncio
import threading
from concurrent.futures import Future

import pytest
import torch
from fake_engine import PROBLEMS, FakeEngine, TablePolicy
from scripted_engine import CharTokenizer
from test_trainers_rl import Silent

from openrlhf.agents.episodes import OwnEpisodes
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.observability.loggers import NullLogger
from openrlhf.observability.metrics import Metrics
from openrlhf.observability.usage import Usage
from openrlhf.rewards.base import Reward
from openrlhf.rollout.async_collector import AsyncCollector
from openrlhf.rollout.collector import SyncCollector
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.trainers.evaluation import BackgroundEvaluation, BestMetric, PromptEvaluation
from openrlhf.trainers.hybrid import DeviceTurns, DeviceUsage
from openrlhf.trainers.pipelines import Async, AsyncPartial, CarryOver, EngineParts, Overlap, Sync
from openrlhf.trainers.rl import RLTrainer, RunPeriods
from openrlhf.types import Prompt, SamplingParams
from openrlhf.utils.event_loops import BackgroundRunner
from openrlhf.weight_sync.base import Pushed, SharedWeightSync, push
from openrlhf.weight_sync.blocks import WeightBlock

BATCH = 2


@pytest.fixture(scope="module")
def loop():
    with BackgroundRunner() as running:
        yield running


def prompt(number: int, name: str = "") -> Prompt:
    problem = PROBLEMS[number % len(PROBLEMS)]
    return Prompt(ordinal=number, text=f"{problem}>{name or number}", label="".join(sorted(problem)))


class Prompts:
    """The first `count` prompts, in order."""

    def __init__(self, count: int) -> None:
        self.left = [prompt(i) for i in range(count)]

    def take(self, n):
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def give_back(self, ordinals): ...

    def settle(self, scores): ...

    def metrics(self):
        return Metrics()


class SortingReward:
    """The share of digits in their places."""

    async def score(self, request):
        answers = zip(request.queries, request.prompts, request.labels, strict=True)
        right = [sum(a == b for a, b in zip(q[len(p) :], label, strict=True)) for q, p, label in answers]
        return [Reward(reward=n / 3, score=n / 3) for n in right]


class Pusher:
    """The real order of a push, with one block of weights. Implements `WeightSync`."""

    def __init__(self, engine, policy, loop) -> None:
        self.engine, self.policy, self.loop = engine, policy, loop

    def push(self, *, version):
        return push(self.engine, version=version, loop=self.loop, send=self.send, probe_gap=None)

    def send(self):
        logits = self.policy.logits.detach()
        payload = logits.clone().flatten().view(torch.uint8)
        block = WeightBlock(("logits",), (tuple(logits.shape),), "float32", payload)
        self.loop.run(self.engine.load_weights([block]))
        return Pushed(1, block.num_bytes)


class TableWorkers:
    """Trains the table with REINFORCE and the group's mean as baseline. Implements `Workers`."""

    def __init__(self, policy, run) -> None:
        self.policy, self.run = policy, run
        self.rounds = 0
        self.groups = []

    def place(self, groups):
        self.groups += groups
        return groups, Metrics()

    def score(self, batch): ...

    def assign_advantages(self, batch):
        return Metrics()

    def update(self, batch, *, keep=False):
        self.rounds += 1
        self.run.events.append(f"train {self.rounds}")
        engine = self.run.engine
        assert not (engine.shares_weights and engine.running.is_set()), "weights change under an engine that samples"
        loss = torch.zeros(())
        for group in batch:
            mean = sum(t.reward for t in group.scored) / len(group.scored)
            for t in group.scored:
                actions = t.segments[0].token_ids[t.segments[0].action_mask] - ord("1")
                logprobs = self.policy.logprobs(group.prompt.text[:3]).gather(1, actions[:, None])
                loss = loss - (t.reward - mean) * logprobs.sum()
        (gradient,) = torch.autograd.grad(loss, [self.policy.logits])
        with torch.no_grad():
            self.policy.logits -= gradient
        for action in self.run.during_update.get(self.rounds, ()):
            action()
        return Metrics()

    def state_dict(self):
        return {}


class Run:
    """A pipeline around a fake engine, and the RL loop."""

    def __init__(self, loop, kind, *, prompts=12, samples=1, shared_device=False, shares_weights=False, ahead=1,
                 at_once=None, usage=dict):  # fmt: skip
        self.loop, self.events, self.during_update = loop, [], {}
        self.policy = TablePolicy()
        own = self.policy if shares_weights else TablePolicy()
        self.engine = FakeEngine(own, self.events, shares_weights=shares_weights, asleep=shared_device)
        weights = (SharedWeightSync if shares_weights else Pusher)(self.engine, self.policy, loop)
        episodes = OwnEpisodes(SingleTurnAgentExecutor(), engine=self.engine, tokenizer=CharTokenizer(), max_length=64)
        runner = EpisodeRunner(episodes=episodes, reward=SortingReward(), seed=0)
        params = SamplingParams(max_tokens=3)
        evaluation = PromptEvaluation(
            prompts=[prompt(0, "eval")], runner=runner, loop=loop, samples_per_prompt=1, sampling_params=params
        )
        parts = EngineParts(self.engine, weights, DeviceUsage(usage), loop)
        shared = {"prompts": Prompts(prompts), "runner": runner, "loop": loop, "batch_size": BATCH,
                  "samples_per_prompt": samples, "sampling_params": params}  # fmt: skip
        turns = DeviceTurns(loop, engine=self.engine, backends=[self], release=lambda: None) if shared_device else (
            DeviceTurns(loop))  # fmt: skip
        lasting = {**shared, "engine": self.engine, "at_once": at_once}
        beside = BackgroundEvaluation(evaluation, loop)
        if kind is Sync:
            self.pipeline = Sync(parts, SyncCollector(**shared), turns, evaluation)
        elif kind is CarryOver:
            self.pipeline = CarryOver(parts, AsyncCollector(**lasting, ahead=False), turns, evaluation)
        elif kind is AsyncPartial:
            self.pipeline = AsyncPartial(parts, AsyncCollector(**lasting, queue_size=ahead), beside)
        else:
            make = lambda behind: AsyncCollector(**lasting, queue_size=ahead, behind=behind)  # noqa: E731
            self.pipeline = Async(parts, make, beside)
        self.workers = TableWorkers(self.policy, self)
        self._next_batch, self.pipeline.next_batch = self.pipeline.next_batch, self.next_batch

    def next_batch(self):
        """Threads do not decide the order of events: what a round lets begin has begun when it is trained on."""
        batch = self._next_batch()
        self.let_others_run()
        return batch

    def sleep(self):
        self.events.append("optimizer off the device")

    def wake(self):
        self.events.append("optimizer on the device")

    def stop(self, name, *, place=1):
        """Requests of a prompt stop before this place; returns what lets them go on."""
        event = asyncio.Event()
        self.engine.stops[name] = (place, event)
        return lambda: self.loop.run(_set(event))

    def let_others_run(self):
        """Until every episode in play has ended or waits for something."""
        self.loop.run(_many_turns())

    def trainer(self, schedule) -> RLTrainer:
        return RLTrainer(pipeline=self.pipeline, workers=self.workers, best=BestMetric(), schedule=schedule,
                         logger=NullLogger(), rollout_log=Silent(), ledger=Silent(), progress=Silent())  # fmt: skip

    def fit(self, rounds, **schedule) -> list[str]:
        self.trainer(RunPeriods(rounds=rounds, **schedule)).fit()
        return self.told()

    def told(self) -> list[str]:
        """What happened, without answers; requests side by side in one line, in order of their prompts."""
        lines = []
        for event in self.events:
            kind, _, name = event.partition(" ")
            if kind == "generate" and lines and lines[-1].startswith(kind):
                lines[-1] = " ".join([kind, *sorted([*lines[-1].split()[1:], name], key=lambda n: (len(n), n))])
            elif kind != "answer":
                lines.append(event)
        return lines

    def versions(self) -> dict[int, list[int]]:
        """Of the tokens that were trained on, by prompt."""
        return {
            group.prompt.ordinal: t.segments[0].versions[t.segments[0].action_mask].tolist()
            for group in self.workers.groups
            for t in group.scored
        }


async def _set(event):
    event.set()


async def _many_turns():
    for _ in range(60):
        await asyncio.sleep(0)


def test_sync_on_a_shared_device_sleeps_while_it_trains(loop):
    told = Run(loop, Sync, shared_device=True).fit(rounds=2)
    assert told == [
        "optimizer off the device", "wake", "load_weights", "resume 0", "generate 0 1",
        "sleep", "optimizer on the device", "train 1",
        "optimizer off the device", "wake", "load_weights", "resume 1", "generate 2 3",
        "sleep", "optimizer on the device", "train 2",
        "optimizer off the device", "wake", "load_weights", "resume 2",
    ]  # fmt: skip


def test_sync_with_devices_of_its_own_pauses_for_the_push_alone(loop):
    told = Run(loop, Sync).fit(rounds=2)
    pushed = ["pause", "load_weights"]
    assert told == [
        *pushed, "resume 0", "generate 0 1", "train 1", *pushed, "resume 1", "generate 2 3", "train 2",
        *pushed, "resume 2",
    ]  # fmt: skip


def test_sync_pauses_an_engine_whose_weights_are_trained(loop):
    told = Run(loop, Sync, shares_weights=True).fit(rounds=2)
    assert told == ["generate 0 1", "pause", "train 1", "resume 1", "generate 2 3", "pause", "train 2", "resume 2"]


def test_sync_evaluates_to_the_end_between_two_rounds(loop):
    run = Run(loop, Sync)
    run.fit(rounds=2, eval_every=1)
    at = run.events.index("generate eval")
    assert run.events[at - 1 : at + 3] == ["resume 1", "generate eval", "answer eval", "generate 2"]


@pytest.mark.parametrize("shared_device", [False, True])
def test_carry_over_stops_stragglers_in_the_middle_and_goes_on_after_the_push(loop, shared_device):
    """Three prompts in play, two in a round. 0 has one digit when the first round has its groups, and gets the others
    from the next weights, in the round after it."""
    run = Run(loop, CarryOver, shared_device=shared_device, at_once=3)
    run.during_update[1] = [run.stop("0")]
    told = run.fit(rounds=2)
    to_training, to_rollout = (
        (["pause", "sleep", "optimizer on the device"], ["optimizer off the device", "wake", "load_weights"])
        if shared_device
        else (["pause"], ["load_weights"])
    )
    first = to_rollout if shared_device else ["pause", "load_weights"]
    assert told == [
        *first, "resume 0", "generate 0 1 2", *to_training, "train 1", *to_rollout, "resume 1", "generate 3 4",
        *to_training, "train 2", *to_rollout, "resume 2",
    ]  # fmt: skip
    assert run.versions()[0] == [0, 1, 1]


def test_carry_over_pauses_an_engine_whose_weights_are_trained(loop):
    run = Run(loop, CarryOver, shares_weights=True, at_once=3)
    run.during_update[1] = [run.stop("0")]
    assert run.fit(rounds=2) == [
        "generate 0 1 2", "pause", "train 1", "resume 1", "generate 3 4", "pause", "train 2", "resume 2"
    ]  # fmt: skip
    assert run.versions()[0] == [0, 1, 1]


def soon(action):
    """In a moment, from another thread: for what waits in the meantime."""
    return threading.Timer(0.05, action).start


def test_async_defers_a_push_while_rounds_can_be_had_without_it(loop):
    """Two rounds ahead, 5 is slow. The first update is not pushed: 2, 3, 4 and 5 are more than a round. After the second
    4 and 5 are all there is: the push comes, when 5 has ended. What begins then has its version."""
    run = Run(loop, Async, ahead=2, at_once=4, prompts=10)
    run.during_update[2] = [soon(run.stop("5"))]
    pushed = ["pause", "load_weights"]
    assert run.fit(rounds=3) == [
        *pushed, "resume 0", "generate 0 1 2 3 4 5", "train 1", "train 2",
        *pushed, "resume 2", "generate 6 7 8 9", "train 3", *pushed, "resume 3",
    ]  # fmt: skip
    assert run.events.index("answer 5") < run.events.index("resume 2") - 2
    assert run.versions() == {number: [0, 0, 0] for number in range(6)}


def test_async_one_round_ahead_pushes_every_update_when_nothing_is_in_play(loop):
    run = Run(loop, Async, prompts=6)
    pushed = ["pause", "load_weights"]
    assert run.fit(rounds=3) == [
        *pushed, "resume 0", "generate 0 1 2 3", "train 1", *pushed, "resume 1", "generate 4 5", "train 2",
        *pushed, "resume 2", "train 3", *pushed, "resume 3",
    ]  # fmt: skip


def test_async_drains_before_it_trains_the_weights_that_its_engine_samples_with(loop):
    run = Run(loop, Async, shares_weights=True, prompts=6)
    assert run.fit(rounds=3) == [
        "generate 0 1 2 3", "pause", "train 1", "resume 1", "generate 4 5", "pause", "train 2", "resume 2",
        "pause", "train 3", "resume 3",
    ]  # fmt: skip
    assert all(len(set(versions)) == 1 for versions in run.versions().values())


def test_async_evaluates_the_newest_weights(loop):
    """The push of version 1 was deferred: the evaluation waits for it, and it for what is in play."""
    run = Run(loop, Async, ahead=2, at_once=4, prompts=6)
    release = run.stop("5")
    run.during_update[1] = [soon(release)]
    trainer = run.trainer(RunPeriods(rounds=1))
    trainer.fit()
    assert run.engine.version == 0
    run.pipeline.evaluate()
    assert run.pipeline.evaluation.result(wait=True)["eval_num_samples"] == 1
    assert run.told()[-5:] == ["train 1", "pause", "load_weights", "resume 1", "generate eval"]


@pytest.mark.parametrize("kind", [Async, AsyncPartial])
def test_a_push_waits_for_the_evaluation_of_the_weights_it_replaces(loop, kind):
    run = Run(loop, kind, prompts=4)
    release = run.stop("eval")
    run.pipeline.start(0)
    run.pipeline.evaluate()
    assert run.pipeline.evaluation.result() is None
    run.pipeline.next_batch()
    run.pipeline.begin_training()
    soon(release)()
    values = run.pipeline.finish_training(1).values()
    assert values["timing/evaluation_wait"] > 0
    assert run.events.index("answer eval") < run.events.index("resume 1") - 2
    assert run.pipeline.evaluation.result()["eval_num_samples"] == 1
    assert run.pipeline.evaluation.result() is None


@pytest.mark.parametrize("kind", [Async, AsyncPartial])
def test_training_waits_for_the_evaluation_of_weights_that_it_changes_in_place(loop, kind):
    run = Run(loop, kind, shares_weights=True, prompts=4)
    release = run.stop("eval")
    run.pipeline.start(0)
    run.pipeline.evaluate()
    run.pipeline.next_batch()
    soon(release)()
    run.pipeline.begin_training()
    assert run.events.index("answer eval") < run.events.index("pause")
    run.pipeline.finish_training(1)
    assert run.events[-1] == "resume 1" or kind is Async


@pytest.mark.parametrize("shares_weights", [False, True])
def test_async_partial_pushes_in_the_middle_of_responses(loop, shares_weights):
    """Three in play. 2 has one digit when the first update is pushed, and gets the others from its weights."""
    run = Run(loop, AsyncPartial, shares_weights=shares_weights, ahead=2, at_once=3, prompts=5)
    release = run.stop("2")
    trainer = run.trainer(RunPeriods(rounds=2))
    trainer.pipeline.start(0)
    trainer.step()
    release()
    run.let_others_run()
    trainer.step()
    push = ["pause", "load_weights"]
    first = [] if shares_weights else [*push, "resume 0"]
    rounds = (
        ["generate 0 1 2 3 4", "pause", "train 1", "resume 1", "pause", "train 2", "resume 2"]
        if shares_weights
        else ["generate 0 1 2 3 4", "train 1", *push, "resume 1", "train 2", *push, "resume 2"]
    )
    assert run.told() == [*first, *rounds]
    assert run.versions()[2] == [0, 1, 1]


@pytest.mark.parametrize("shares_weights", [False, True])
@pytest.mark.parametrize("kind", [Sync, CarryOver, Async, AsyncPartial])
def test_a_fake_engine_learns_the_task_through_each_pipeline(loop, kind, shares_weights):
    """Chance puts a third of the digits right."""
    run = Run(loop, kind, prompts=60, samples=8, shares_weights=shares_weights, ahead=2, at_once=3)
    run.fit(rounds=30)
    scores = [sum(t.score for t in group.scored) / 8 for group in run.workers.groups]
    assert sum(scores[:6]) / 6 < 0.6
    assert sum(scores[-6:]) / 6 > 0.9
    assert torch.equal(run.engine.policy.logits, run.policy.logits)
    assert run.engine.version == 30


def test_usage_is_taken_before_the_engine_sleeps_and_a_look_meanwhile_is_left_out(loop):
    """What a meter saw while the engine fell asleep is of neither phase: 60 and 50 GiB are, and 90 is not."""
    peaks = iter([60, 90, 50])
    run = Run(loop, Sync, shared_device=True, usage=lambda: {"n1": Usage(0.5, next(peaks))})
    run.pipeline.start(0)
    run.pipeline.next_batch()
    metrics = run.pipeline.begin_training()
    assert run.events[-2:] == ["sleep", "optimizer on the device"]
    metrics.merge(run.pipeline.finish_training(1))
    busy = {"device/n1/generation_busy": 0.5, "device/n1/training_busy": 0.5}
    assert metrics.values() == busy | {
        "memory/peak_generation_gb": 60, "memory/peak_training_gb": 50, "sync/buckets": 1, "sync/bytes": 180
    }  # fmt: skip


class Slow:
    """An evaluation that ends when it is told to."""

    def __init__(self):
        self.answer = Future()

    async def play(self):
        return await asyncio.wrap_future(self.answer)


def test_what_is_wrong_with_a_background_evaluation_is_raised_where_its_result_is_taken(loop):
    slow = Slow()
    beside = BackgroundEvaluation(slow, loop)
    beside.start()
    slow.answer.set_exception(RolloutError("all 3 evaluation groups failed"))
    beside.wait()
    with pytest.raises(RolloutError, match="all 3"):
        beside.result()


def test_overlap_is_the_share_of_a_round_in_which_rollout_went_on_beside_training(monkeypatch):
    """The second round begins at 0.5 with the end of the first. Its training begins at 0.75, when nothing is in play,
    and ends at 1.25; from 1.0 on something is: (1.25 − 1.0) / (1.25 − 0.5) = 1/3."""
    now = [0.0]
    monkeypatch.setattr("openrlhf.trainers.pipelines.time.perf_counter", lambda: now[0])

    class Collector:
        @property
        def seconds_in_play(self):
            return max(0.0, now[0] - 1.0)

    overlap = Overlap(Collector())
    overlap.begin()
    now[0] = 0.5
    assert overlap.end().values() == {}
    now[0] = 0.75
    overlap.begin()
    now[0] = 1.25
    assert overlap.end().values()["perf/overlap"] == pytest.approx(1 / 3)
