"""The supervised trainers learn: synthetic data, tiny models, seconds."""

import copy
import random

import pytest
import torch
from small_supervised import (
    CPU,
    Judged,
    Samples,
    example,
    make_backend,
    make_policy,
    make_reward_model,
    make_trainer,
    pair,
)
from transformers import AutoModelForSequenceClassification

from openrlhf.algorithms.preferences import get_reward_loss
from openrlhf.checkpoint.export import export_value_model
from openrlhf.config.models import DPOModelSection
from openrlhf.trainers.dpo import DPOObjective
from openrlhf.trainers.kto import KTOObjective
from openrlhf.trainers.preferences import Reference, answer_logprobs
from openrlhf.trainers.reward_model import RewardObjective, reward_statistics
from openrlhf.trainers.sft import SFTObjective, pack

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(rng, low, high):
    return [rng.randrange(2, 16) for _ in range(rng.randint(low, high))]


def test_sft_learns_a_few_answers_by_heart():
    """Eight random answers to eight prompts, so only memory helps: from log 16 ≈ 2.8 to nearly 0."""
    rng = random.Random(0)
    examples = Samples(example([i + 2, 3], tokens(rng, 3, 6)) for i in range(8))
    objective = SFTObjective(examples, device=CPU)
    trainer, memory = make_trainer(
        make_backend(make_policy()), objective, batch_size=8, budget=24, steps=80, evaluation=objective, eval_every=1000
    )
    trainer.fit()
    losses = [r["gpt_loss"] for r in memory.of("train")]
    assert losses[0] > 2.0
    assert losses[-1] < 0.05
    assert trainer.last_evaluation["eval gpt_loss"] < 0.05


def preference_pairs(count, *, seed):
    """The better answer has more tokens from the upper half of the vocabulary; no ties."""
    rng, pairs = random.Random(seed), Samples()
    while len(pairs) < count:
        prompt, *answers = tokens(rng, 2, 2), tokens(rng, 4, 5), tokens(rng, 4, 5)
        worth = [sum(token >= 9 for token in answer) for answer in answers]
        if worth[0] != worth[1]:
            better, worse = sorted(answers, key=lambda a: -sum(token >= 9 for token in a))
            pairs.append(pair(prompt, better, worse))
    return pairs


def test_a_reward_model_judges_pairs_it_has_not_seen(tmp_path):
    train, held_out = (
        RewardObjective(preference_pairs(n, seed=s), loss=get_reward_loss("sigmoid"), margins=False, device=CPU)
        for n, s in ((512, 0), (200, 1))
    )
    model = make_reward_model()
    trainer, memory = make_trainer(
        make_backend(model), train, batch_size=64, budget=1200, steps=48, evaluation=held_out, eval_every=24
    )
    evaluation = trainer.fit()
    assert memory.of("train")[0]["acc"] < 0.8
    assert evaluation["acc_mean"] >= 0.95

    statistics = reward_statistics(evaluation)
    folder = export_value_model(model, None, tmp_path / "model", statistics=statistics)
    classifier = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    assert (classifier.config.mean, classifier.config.std) == pytest.approx(statistics)
    some = [p.chosen for p in preference_pairs(20, seed=2)]
    ours = model(pack(some), positions=torch.tensor([len(e.token_ids) for e in some]).cumsum(0) - 1)
    with torch.no_grad():
        theirs = [classifier(e.token_ids[None]).logits.item() for e in some]
    assert ours.tolist() == pytest.approx(theirs, abs=1e-4)

    # As documents show it: padded on the left, the body, and the head where every text ends.
    longest = max(len(e.token_ids) for e in some)
    assert len({len(e.token_ids) for e in some}) > 1
    ids = torch.stack([torch.nn.functional.pad(e.token_ids, (longest - len(e.token_ids), 0)) for e in some])
    mask = torch.stack([torch.arange(longest) >= longest - len(e.token_ids) for e in some]).long()
    with torch.no_grad():
        padded = classifier.score(classifier.model(input_ids=ids, attention_mask=mask)[0])[:, -1].squeeze(-1)
    assert padded.tolist() == pytest.approx(theirs, abs=1e-4)


def answers_to(prompts):
    """The liked answer copies the prompt's first token and says 10; the disliked one says 12."""
    return [(prompt, [prompt[0], 10, 1], [prompt[0], 12, 1]) for prompt in prompts]


@pytest.mark.parametrize("name", ["dpo", "cdpo", "ipo", "kto"])
def test_preference_training_makes_the_better_answer_likelier_on_new_prompts(name):
    rng = random.Random(0)
    everything = answers_to([tokens(rng, 2, 4) for _ in range(160)])
    seen, unseen = everything[:128], everything[128:]
    policy = make_policy()
    reference = Reference(copy.deepcopy(policy), device=CPU)
    if name == "kto":
        judged = Samples(Judged(example=example(p, a), desirable=d) for p, *two in seen for a, d in zip(two, (True, False), strict=True))  # fmt: skip
        objective = KTOObjective(
            judged, beta=0.1, reference=reference, max_len=16, tokens_per_forward=2000, seed=0, device=CPU
        )
    else:
        settings = DPOModelSection(beta=0.1, ipo_enable=name == "ipo", label_smoothing=0.1 if name == "cdpo" else 0.0)
        objective = DPOObjective(Samples(pair(*row) for row in seen), settings, reference=reference, device=CPU)

    def likelihoods():
        with torch.no_grad():
            liked = answer_logprobs(policy, pack([example(p, good) for p, good, _ in unseen]))
            disliked = answer_logprobs(policy, pack([example(p, bad) for p, _, bad in unseen]))
        return liked, disliked

    liked_before, disliked_before = likelihoods()
    trainer, memory = make_trainer(make_backend(policy, lr=3e-3), objective, batch_size=32, budget=600, steps=40)
    trainer.fit()
    liked, disliked = likelihoods()
    assert (liked - liked_before).mean() > 0.5
    assert ((liked - disliked) > (liked_before - disliked_before)).float().mean() >= 0.95
    assert memory.of("train")[-1]["acc"] >= 0.95
    assert memory.of("train")[-1]["loss"] < memory.of("train")[0]["loss"]
