"""The loop, the collector and the runner, against small fakes that behave."""

import asyncio
import signal
from collections.abc import Iterable

import numpy as np
import pytest
from scripted_engine import CharTokenizer

from openrlhf.agents.episodes import OwnEpisodes
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.algorithms.advantages import get_estimator
from openrlhf.learners.advantages import AdvantageSettings, training_samples
from openrlhf.observability.loggers import NullLogger
from openrlhf.observability.metrics import Metrics, PhaseClock
from openrlhf.rewards.base import Reward, RewardError
from openrlhf.rewards.combined import CombinedReward
from openrlhf.rollout.collector import PromptsExhausted, SyncCollector, rollout_metrics
from openrlhf.rollout.runner import HOPELESS_AFTER, EpisodeRunner, RolloutError
from openrlhf.trainers.evaluation import BestMetric, evaluation_metrics
from openrlhf.trainers.rl import RLTrainer, RunPeriods
from openrlhf.types import FinishReason, Generation, Outcome, Prompt, SamplingParams
from openrlhf.utils.interrupts import Stopped, StopRequest


class EchoEngine:
    """Answers `ab` with its first character and a digit made from the seed; remembers what it was asked."""

    max_model_len = 64

    def __init__(self) -> None:
        self.version = 0
        self.asked: list[SamplingParams] = []

    async def generate(self, token_ids, sampling_params, images=()) -> Generation:
        self.asked.append(sampling_params)
        await asyncio.sleep(0)
        ids = [token_ids[0], ord("0") + sampling_params.seed % 10][: sampling_params.max_tokens]
        reason = FinishReason.STOP if len(ids) == 2 else FinishReason.LENGTH
        return Generation(
            token_ids=ids, logprobs=[-0.5] * len(ids), versions=[self.version] * len(ids), finish_reason=reason
        )


class LengthReward:
    """Rewards 1 per sample; fails for prompts that begin with a letter in `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.calls = []

    async def score(self, request):
        self.calls.append(request)
        await asyncio.sleep(0)
        if request.prompts[0][0] in self.broken:
            raise RewardError(f"rewards.py:3: cannot judge {request.name}")
        return [Reward(reward=1.0, extra_logs={"n": float(len(request.queries))}) for _ in request.queries]


class Prompts:
    """A short prompt stream."""

    def __init__(self, texts: list[str]) -> None:
        self.all = [Prompt(ordinal=i, text=t, label=t.upper()) for i, t in enumerate(texts)]
        self.left = list(self.all)

    def take(self, n: int) -> list[Prompt]:
        taken, self.left = self.left[:n], self.left[n:]
        return taken

    def give_back(self, ordinals) -> None:
        self.left = [*(self.all[i] for i in sorted(ordinals)), *self.left]

    def settle(self, scores) -> None: ...

    def metrics(self) -> Metrics:
        return Metrics()


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner


def make_runner(engine, reward, *, max_length: int = 64, **others) -> EpisodeRunner:
    episodes = OwnEpisodes(SingleTurnAgentExecutor(), engine=engine, tokenizer=CharTokenizer(), max_length=max_length)
    return EpisodeRunner(episodes=episodes, reward=reward, seed=0, **others)


def make_collector(loop, texts, reward, *, batch_size=2, engine=None) -> SyncCollector:
    return SyncCollector(
        prompts=Prompts(texts),
        runner=make_runner(engine or EchoEngine(), reward),
        loop=loop,
        batch_size=batch_size,
        samples_per_prompt=3,
        sampling_params=SamplingParams(max_tokens=2),
    )


class Fixed:
    """Gives a prompt's samples these rewards, as a model gives them: in float32."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = [float(np.float32(reward)) for reward in rewards]

    async def start(self) -> None: ...

    async def score(self, request) -> list[Reward]:
        return [Reward(reward=reward) for reward in self.rewards]

    async def close(self) -> None: ...


def test_sources_that_add_up_to_the_same_teach_nothing(loop):
    """0.9 as 0.9 + 0, as 0.3 + 0.6 and as 100.9 − 100, whose float32 parts are 3e-6 away from it."""
    reward = CombinedReward({"a": Fixed(0.9, 0.3, 100.9), "b": Fixed(0.0, 0.6, -100.0)}, [1.0, 1.0])
    groups = make_collector(loop, ["ab", "cd"], reward).next_batch().groups
    assert len({t.reward for t in groups[0].trajectories}) > 1
    shaped = training_samples(groups, AdvantageSettings(estimator=get_estimator("group_norm")))
    assert [sample.compared_A.any().item() for sample in shaped.samples] == [False] * 6


def test_groups_come_in_prompt_order_and_each_is_judged_once(loop):
    reward = LengthReward()
    collector = make_collector(loop, ["ab", "cd", "ef"], reward)
    first, second = collector.next_batch().groups
    assert [first.prompt.text, second.prompt.text] == ["ab", "cd"]
    assert len(reward.calls) == 2
    assert reward.calls[0].labels == ("AB", "AB", "AB")
    assert all(q.startswith(p) for q, p in zip(reward.calls[0].queries, reward.calls[0].prompts, strict=True))
    assert [t.key for t in first.trajectories] == [(0, 0, 0), (0, 1, 0), (0, 2, 0)]
    assert len(collector.next_batch().groups) == 1


def test_samples_of_a_prompt_have_their_own_seeds_that_do_not_depend_on_company(loop):
    alone, together = EchoEngine(), EchoEngine()
    make_collector(loop, ["ab"], LengthReward(), engine=alone).next_batch()
    make_collector(loop, ["ab", "cd"], LengthReward(), engine=together).next_batch()
    seeds = [p.seed for p in alone.asked]
    assert len(set(seeds)) == 3
    assert seeds == [p.seed for p in together.asked][:3]


def test_evaluation_draws_other_seeds_than_training(loop):
    engine = EchoEngine()
    runner = make_runner(engine, LengthReward())
    prompt = Prompt(ordinal=0, text="ab")
    loop.run(runner.play(prompt, n=1, sampling_params=SamplingParams(), purpose="train"))
    loop.run(runner.play(prompt, n=1, sampling_params=SamplingParams(), purpose="eval"))
    assert engine.asked[0].seed != engine.asked[1].seed


def test_a_prompt_too_long_for_its_response_is_cut_from_the_left(loop):
    runner = make_runner(EchoEngine(), LengthReward(), max_length=4)
    group = loop.run(runner.play(Prompt(ordinal=0, text="abcdef"), n=1, sampling_params=SamplingParams(max_tokens=2)))
    segment = group.trajectories[0].segments[0]
    assert [chr(i) for i in segment.token_ids.tolist()][:3] == ["e", "f", "e"]
    assert len(segment) == 4


def test_hitting_the_token_limit_is_reported_as_truncation(loop):
    runner = make_runner(EchoEngine(), LengthReward())
    group = loop.run(runner.play(Prompt(ordinal=0, text="ab"), n=1, sampling_params=SamplingParams(max_tokens=1)))
    assert group.trajectories[0].outcome is Outcome.TRUNCATED


def test_one_failed_reward_is_data_and_is_never_scored_zero(loop):
    good, bad = make_collector(loop, ["ab", "xy"], LengthReward(broken="x")).next_batch().groups
    assert len(good.scored) == 3
    assert bad.scored == ()
    assert all("rewards.py:3" in t.error for t in bad.trajectories)
    values = rollout_metrics([good, bad], max_length=64).values()
    assert values["rollout/failed"] == 3
    assert values["rollout/reward_mean"] == 1.0
    assert values["n"] == 3.0


def test_a_reward_that_never_worked_ends_the_run_with_its_reason(loop):
    texts = ["x"] * (HOPELESS_AFTER + 2)
    with pytest.raises(RolloutError, match=r"reward calls all failed: rewards.py:3"):
        make_collector(loop, texts, LengthReward(broken="x"), batch_size=len(texts)).next_batch()


def test_in_a_continued_run_the_first_failures_are_data(loop):
    """The reward has worked before: that the next prompts are ones it cannot judge is bad luck."""
    runner = make_runner(EchoEngine(), LengthReward(broken="x"), has_worked=True)
    prompts = [Prompt(ordinal=i, text="x") for i in range(HOPELESS_AFTER + 2)]
    groups = loop.run(runner.play_all(prompts, n=1, sampling_params=SamplingParams(max_tokens=2)))
    assert all(t.failed for group in groups for t in group.trajectories)


def test_a_round_in_which_all_failed_ends_the_run(loop):
    collector = make_collector(loop, ["ab", "cd", "xy", "xz"], LengthReward(broken="x"))
    collector.next_batch()
    with pytest.raises(RolloutError, match=r"all 2 groups of a round failed.*rewards.py:3"):
        collector.next_batch()


class EventLog:
    """Pipeline, workers and evaluation in one: writes down who was called in which order."""

    def __init__(self, loop, evaluations: Iterable[float] = (0.5, 0.5)) -> None:
        self.events: list = []
        self.source = make_collector(loop, ["ab", "cd", "ef", "gh"], LengthReward())
        self.evaluations = iter(evaluations)

    def next_batch(self):
        self.events.append("collect")
        return self.source.next_batch()

    def place(self, groups):
        self.events.append("place")
        return len(groups), Metrics()

    def score(self, batch):
        self.events.append("score")

    def assign_advantages(self, batch):
        self.events.append("advantages")
        return Metrics()

    def update(self, batch, *, keep=False):
        self.events.append("update")
        metrics = Metrics()
        metrics.last("policy_loss", 0.5)
        return metrics

    @property
    def evaluation(self):
        return self

    def start(self, version):
        self.events.append(("push", version))

    def begin_training(self):
        self.events.append("begin")
        return Metrics()

    def finish_training(self, version):
        self.events.append(("push", version))
        return Metrics()

    def state_dict(self):
        return {"asked": len(self.events)}

    def load_state_dict(self, state):
        self.events.append("loaded")

    def evaluate(self):
        self.events.append("evaluate")
        self.found = {"eval_default_pass1": next(self.evaluations)}

    def result(self, *, wait=False):
        found, self.found = self.found, None
        return found


class Silent:
    """Progress and rollout log that show nothing."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def phase(self, name): ...
    def step(self, step, metrics): ...
    def evaluation(self, step, metrics): ...
    def write(self, step, groups, *, rejected_prompts=()): ...

    def note(self, text):
        self.notes.append(text)

    def end_early(self, why):
        self.notes.append(f"early: {why}")


class RememberingLogger(NullLogger):
    def __init__(self) -> None:
        self.records = []

    def log(self, step, metrics, *, kind="train"):
        self.records.append((step, kind, dict(metrics)))


def make_trainer(log: EventLog, schedule: RunPeriods, logger, progress: Silent | None = None) -> RLTrainer:
    return RLTrainer(
        pipeline=log,
        workers=log,
        best=BestMetric(),
        schedule=schedule,
        logger=logger,
        rollout_log=Silent(),
        ledger=Silent(),
        progress=progress or Silent(),
    )


def test_a_step_is_collect_begin_place_score_advantages_update_push(loop):
    """Before the first one the engine is given the policy's weights: it may have none of its own."""
    log = EventLog(loop)
    make_trainer(log, RunPeriods(rounds=2), NullLogger()).fit()
    one_round = ["collect", "begin", "place", "score", "advantages", "update"]
    assert log.events == [("push", 0), *one_round, ("push", 1), *one_round, ("push", 2)]


def test_evaluation_happens_at_the_ends_and_in_between_once_each(loop):
    log, logger = EventLog(loop), RememberingLogger()
    result = make_trainer(log, RunPeriods(rounds=2, eval_every=2, eval_at_ends=True), logger).fit()
    assert [(step, kind) for step, kind, _ in logger.records] == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval")]
    assert result == {"eval_default_pass1": 0.5}
    train = logger.records[1][2]
    assert train["policy_loss"] == 0.5
    assert train["rollout/reward_mean"] == 1.0
    assert {"timing/generation", "timing/ppo_train", "timing/step_total", "perf/tokens_per_second"} <= set(train)


def test_tokens_per_second_are_those_of_judged_samples_over_the_time_of_the_round(loop):
    """Two groups of three samples, each 2 tokens of prompt and 2 of answer; one group cannot be judged. A round takes
    2 s of collecting and 1 s of updating: 12 / 3 tokens, 6 / 3 of them generated. Neither the 100 s of the first push
    nor the 50 s of each evaluation count."""
    now = [0.0]

    class Slow(EventLog):
        def next_batch(self):
            now[0] += 2.0
            return super().next_batch()

        def update(self, batch, *, keep=False):
            now[0] += 1.0
            return super().update(batch)

        def start(self, version):
            now[0] += 100.0
            super().start(version)

        def evaluate(self):
            now[0] += 50.0
            super().evaluate()

    log, logger = Slow(loop, [0.5] * 4), RememberingLogger()
    log.source = make_collector(loop, ["ab", "xd", "ef", "xh"], LengthReward(broken="x"))
    trainer = make_trainer(log, RunPeriods(rounds=2, eval_every=1), logger)
    trainer.clock = PhaseClock(now=lambda: now[0])
    trainer.fit()
    first, second = (values for _, kind, values in logger.records if kind == "train")
    for values in (first, second):
        assert values["timing/step_total"] == 3.0
        assert values["perf/tokens_per_second"] == 4.0
        assert values["perf/generated_tokens_per_second"] == 2.0


def test_prompts_that_run_out_end_the_run_with_a_last_evaluation(loop):
    """4 prompts in rounds of 2 are 2 rounds, of 5 planned; the evaluations are those before and after."""
    log, logger, progress = EventLog(loop, [0.25, 0.75]), RememberingLogger(), Silent()
    result = make_trainer(log, RunPeriods(rounds=5, eval_at_ends=True), logger, progress).fit()
    assert [(step, kind) for step, kind, _ in logger.records] == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval")]
    assert result == {"eval_default_pass1": 0.75}
    assert progress.notes == ["early: the prompts ran out", "best eval_default_pass1 0.750, after step 2"]


def test_the_ledger_gets_every_round_and_what_the_end_turned_away(loop):
    """One round, and an end that says what became of the rest."""

    class Ledger:
        def __init__(self):
            self.lines = []

        def write(self, step, groups, *, rejected_prompts=()):
            self.lines.append((step, [group.prompt.ordinal for group in groups], list(rejected_prompts)))

    class Picky(EventLog):
        def next_batch(self):
            if "collect" in self.events:
                raise PromptsExhausted("the prompts ran out", rejected_prompts=[4, 5, 6, 7])
            return super().next_batch()._replace(rejected_prompts=[1, 2])

    trainer = make_trainer(Picky(loop), RunPeriods(rounds=4), NullLogger())
    trainer.ledger = Ledger()
    trainer.fit()
    assert trainer.ledger.lines == [(1, [0, 1], [1, 2]), (2, [], [4, 5, 6, 7])]


def test_a_run_that_has_trained_on_nothing_ends_with_an_error(loop):
    """Its model would be the one that it began with."""

    class Empty(EventLog):
        def next_batch(self):
            raise PromptsExhausted("the prompts ran out; 8 of 8 judged groups …", rejected_prompts=[0, 1])

    with pytest.raises(RolloutError, match="not one group was trained on: the prompts ran out; 8 of 8"):
        make_trainer(Empty(loop), RunPeriods(rounds=4), NullLogger()).fit()


def test_an_evaluation_just_made_is_not_made_again_at_the_end(loop):
    log = EventLog(loop, [0.1, 0.2])
    make_trainer(log, RunPeriods(rounds=5, eval_every=2, eval_at_ends=True), NullLogger()).fit()
    assert log.events.count("evaluate") == 2


def test_the_best_evaluation_is_logged_and_told(loop):
    log, logger, progress = EventLog(loop, [0.5, 0.75, 0.25]), RememberingLogger(), Silent()
    make_trainer(log, RunPeriods(rounds=2, eval_every=1, eval_at_ends=True), logger, progress).fit()
    assert [record["eval_best"] for _, kind, record in logger.records if kind == "eval"] == [0.5, 0.75, 0.75]
    assert progress.notes == ["best eval_default_pass1 0.750, after step 1"]


class Shelf:
    """A checkpointer that writes down what it is given, and gives back what it was made with."""

    def __init__(self, state=None):
        self.saved, self._state = {}, state
        self.best = []

    def save(self, step, state, *, best=False):
        self.saved[step] = (state, best)

    def keep_best(self, step):
        self.best.append(step)

    def load(self, take_up):
        if self._state is not None:
            take_up(self._state)
        return self._state


def test_checkpoints_come_at_their_period_and_with_the_best_evaluation(loop):
    """Two rounds, a period of two; the evaluation after the first round is the best one, that after the second not."""
    log, shelf = EventLog(loop, [0.75, 0.25]), Shelf()
    trainer = make_trainer(log, RunPeriods(rounds=2, eval_every=1, save_every=2), NullLogger())
    trainer.checkpointer = shelf
    trainer.fit()
    assert {step: best for step, (_, best) in shelf.saved.items()} == {1: True, 2: False}
    assert shelf.saved[2][0]["best"] == {"key": "eval_default_pass1", "value": 0.75, "step": 1}


def test_without_a_period_nothing_is_kept_however_good(loop):
    log, shelf = EventLog(loop, [0.75, 0.25]), Shelf()
    trainer = make_trainer(log, RunPeriods(rounds=2, eval_every=1), NullLogger())
    trainer.checkpointer = shelf
    trainer.fit()
    assert shelf.saved == {}


def test_a_continued_run_tells_the_engine_its_version_and_evaluates_nothing_twice(loop):
    """One round of two is done and evaluated: no evaluation at the start, one at the end."""
    first, shelf = EventLog(loop, [0.5, 0.75]), Shelf()
    trainer = make_trainer(first, RunPeriods(rounds=1, eval_every=1, eval_at_ends=True, save_every=1), NullLogger())
    trainer.checkpointer = shelf
    trainer.fit()

    log, progress = EventLog(loop, [0.25]), Silent()
    resumed = make_trainer(log, RunPeriods(rounds=2, eval_at_ends=True, save_every=5), NullLogger(), progress)
    resumed.checkpointer = Shelf(shelf.saved[1][0])
    assert resumed.fit() == {"eval_default_pass1": 0.25}
    one_round = ["collect", "begin", "place", "score", "advantages", "update"]
    assert log.events == ["loaded", "loaded", ("push", 1), *one_round, ("push", 2), "evaluate"]
    assert progress.notes == ["best eval_default_pass1 0.750, after step 1"]


class LateLog(EventLog):
    """Evaluations that are over when the next weights are pushed, as those beside training are."""

    ended = False

    def evaluate(self):
        super().evaluate()
        self.ended = False

    def finish_training(self, version):
        self.ended = True
        return super().finish_training(version)

    def result(self, *, wait=False):
        return super().result() if wait or self.ended else None


def test_an_evaluation_beside_training_is_told_under_the_step_it_measured(loop):
    """Begun before round 1, after it and after round 2, the last; each is told after the next push, or at the end."""
    log, logger = LateLog(loop, [0.25, 0.75, 0.5]), RememberingLogger()
    result = make_trainer(log, RunPeriods(rounds=2, eval_every=1, eval_at_ends=True), logger).fit()
    told = [(step, kind, record.get("eval_default_pass1")) for step, kind, record in logger.records]
    assert told == [
        (1, "train", None), (0, "eval", 0.25), (2, "train", None), (1, "eval", 0.75), (2, "eval", 0.5)
    ]  # fmt: skip
    assert result == {"eval_default_pass1": 0.5}
    one_round = ["collect", "begin", "place", "score", "advantages", "update"]
    assert log.events == [
        ("push", 0),
        "evaluate",
        *one_round,
        ("push", 1),
        "evaluate",
        *one_round,
        ("push", 2),
        "evaluate",
    ]


@pytest.mark.parametrize(("metric", "saved", "best"), [("", [1, 2], [1]), ("none", [2], [])])
def test_weights_whose_evaluation_is_not_over_are_saved_in_case_they_are_the_best(loop, metric, saved, best):
    """A period of 2, an evaluation after each of two rounds: 0.75 is the best, and 0.5 is not. Without a metric to follow
    there is nothing to save them for."""
    log, shelf = LateLog(loop, [0.75, 0.5]), Shelf()
    trainer = make_trainer(log, RunPeriods(rounds=2, eval_every=1, save_every=2), NullLogger())
    trainer.checkpointer, trainer.best = shelf, BestMetric(metric)
    trainer.fit()
    assert (list(shelf.saved), shelf.best) == (saved, best)
    assert all(not was_best for _, was_best in shelf.saved.values())


def test_a_continued_run_makes_the_evaluation_that_was_interrupted(loop):
    """With the weights of then, which the checkpoint has; if they are the best it is this checkpoint that is kept."""
    first, shelf = LateLog(loop, [0.5, 0.5]), Shelf()
    trainer = make_trainer(first, RunPeriods(rounds=2, eval_every=1, save_every=1), NullLogger())
    trainer.checkpointer = shelf
    trainer.fit()

    log, logger, resumed_shelf = LateLog(loop, [0.75]), RememberingLogger(), Shelf(shelf.saved[1][0])
    resumed = make_trainer(log, RunPeriods(rounds=2, save_every=5), logger)
    resumed.checkpointer = resumed_shelf
    resumed.fit()
    assert log.events[:4] == ["loaded", "loaded", ("push", 1), "evaluate"]
    assert [(step, kind) for step, kind, _ in logger.records] == [(2, "train"), (1, "eval")]
    assert resumed_shelf.best == [1]


class AskedDuring(EventLog):
    """A signal asks for the end when this is called for the first time."""

    def __init__(self, loop, event, evaluations=(0.5, 0.75)):
        super().__init__(loop, evaluations)
        self.event, self.stop = event, StopRequest()

    def update(self, batch, *, keep=False):
        if self.event == "update":
            self.stop.asked = signal.SIGTERM
        return super().update(batch)

    def evaluate(self):
        if self.event == "evaluate":
            self.stop.asked = signal.SIGTERM
        super().evaluate()


@pytest.mark.parametrize(("event", "evaluated"), [("update", False), ("evaluate", True)])
def test_asked_to_stop_it_ends_the_round_saves_and_stops(loop, event, evaluated):
    """In the first of two rounds, off any period. An evaluation that has not begun is left to whoever goes on."""
    log, shelf = AskedDuring(loop, event), Shelf()
    trainer = make_trainer(log, RunPeriods(rounds=2, eval_every=1, save_every=5), NullLogger())
    trainer.checkpointer, trainer.stop = shelf, log.stop
    with pytest.raises(Stopped) as end:
        trainer.fit()
    assert end.value.by == signal.SIGTERM
    assert list(shelf.saved) == [1]
    assert log.events.count("evaluate") == evaluated

    goes_on, logger = EventLog(loop, [0.5, 0.75][evaluated:]), RememberingLogger()
    resumed = make_trainer(goes_on, RunPeriods(rounds=2, eval_every=1, save_every=5), logger)
    resumed.checkpointer = Shelf(shelf.saved[1][0])
    resumed.fit()
    expected = [(2, "train"), (2, "eval")] if evaluated else [(1, "eval"), (2, "train"), (2, "eval")]
    assert [(step, kind) for step, kind, _ in logger.records] == expected
    best = {step: best for step, (_, best) in resumed.checkpointer.saved.items()}
    assert best == ({2: True} if evaluated else {1: True, 2: True})


def test_evaluation_metrics_by_hand(loop):
    """Two prompts, four samples each; scores 1,0,0,1 and 0,0,0,0: pass1 2/8; pass@4 (1 + 0)/2."""
    runner = make_runner(EchoEngine(), LengthReward())
    groups = []
    for ordinal, scores in enumerate([(1, 0, 0, 1), (0, 0, 0, 0)]):
        prompt = Prompt(ordinal=ordinal, text="ab", datasource="sums")
        played = loop.run(runner.play(prompt, n=4, sampling_params=SamplingParams(max_tokens=2)))
        members = tuple(
            t.with_reward(2.0 * s, score=float(s), extra_logs={})
            for t, s in zip(played.trajectories, scores, strict=True)
        )
        groups.append(type(played)(prompt=prompt, trajectories=members))
    values = evaluation_metrics(groups, k=4).values()
    assert values["eval_sums_pass1"] == 0.25
    assert values["eval_sums_pass4"] == 0.5
    assert values["eval_sums_mean"] == 0.5
    assert values["eval_num_samples"] == 8
    assert values["eval_truncated_rate"] == 0


def test_a_greedy_sample_is_played_and_judged_beside_the_others_and_kept_as_their_baseline(loop):
    """Three samples and a greedy one, which is the last that the reward sees; an evaluation has none."""
    engine = EchoEngine()
    runner = make_runner(engine, Fixed(1.0, 2.0, 3.0, 0.5), greedy_baseline=True)
    prompt = Prompt(ordinal=0, text="ab")
    group = loop.run(runner.play(prompt, n=3, sampling_params=SamplingParams(max_tokens=2)))
    assert sorted(params.temperature for params in engine.asked) == [0.0, 1.0, 1.0, 1.0]
    assert [t.key.sample for t in group.trajectories] == [0, 1, 2]
    assert [(t.reward, t.greedy_reward) for t in group.trajectories] == [(1.0, 0.5), (2.0, 0.5), (3.0, 0.5)]
    runner = make_runner(engine, Fixed(1.0, 2.0), greedy_baseline=True)
    asked = runner.play(prompt, n=2, sampling_params=SamplingParams(max_tokens=2), purpose="eval")
    assert [t.greedy_reward for t in loop.run(asked).trajectories] == [None, None]
    assert [params.temperature for params in engine.asked[4:]] == [1.0, 1.0]
