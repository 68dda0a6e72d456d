"""An RL run that was interrupted ends as one that was not: weights and metrics to the bit, on one process."""

import shutil
import signal

import pytest
import torch
from processes import wait_until
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from universal_checkpoints import rewritten

from openrlhf.observability.loggers import read_metrics, without_times

ROUNDS = 6
RUN = {"train__num_episodes": 3, "ckpt__save_steps": 2, "actor__adam__lr": 1e-3}
"""8 prompts three times, 4 a round."""


def weights(folder):
    return load_file(folder / "model.safetensors")


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def history(run_dir, *, after=0):
    return [without_times(r) for r in read_metrics(run_dir / "metrics.jsonl") if r["step"] > after]


VARIANTS = {
    "group_norm": {},
    "critic": {"algo__advantage__estimator": "gae", "critic__adam__lr": 1e-3, "critic__save_value_network": True},
    "kl": {"algo__kl__init_coef": 0.1, "algo__kl__target": 0.01, "algo__kl__horizon": 20},
    "average": {"train__enable_ema": True, "train__ema_beta": 0.5},
    "waiting groups": {
        "algo__dynamic_filtering_enable": True,
        "rollout__vllm_generate_batch_size": 7,
        "train__num_episodes": 4,
        "train__max_epochs": 2,
    },
}
VARIANTS["curriculum"] = VARIANTS["waiting groups"] | {"data__curriculum": "success"}


@pytest.mark.parametrize("name", VARIANTS)
def test_it_continues_to_the_bit(cli, inputs, tmp_path, name):
    """Interrupted after round 4 of 6, in the second pass over the prompts."""
    # Every group is accepted, and three of seven are too many for a round.
    waits = "algo__dynamic_filtering_enable" in VARIANTS[name]
    extra = ["--algo.dynamic_filtering_range", "-1", "2"] if waits else []
    flags = RUN | VARIANTS[name] | {"eval__dataset": inputs.data, "eval__steps": 3}
    straight = cli(*extra, **flags, ckpt__path=tmp_path / "a", ckpt__output_dir=tmp_path / "out_a")
    assert straight.rc == 0, straight.err
    kept = sorted(p.name for p in (tmp_path / "a").iterdir() if p.name.startswith("global"))
    assert {"global_step4", "global_step6"} <= set(kept)
    assert list((tmp_path / "a").glob("best_global_step*"))

    (tmp_path / "b").mkdir()
    shutil.copytree(tmp_path / "a" / "global_step4", tmp_path / "b" / "global_step4")
    (tmp_path / "run").rename(tmp_path / "first")
    resumed = cli(
        *extra, **flags, ckpt__path=tmp_path / "b", ckpt__output_dir=tmp_path / "out_b", ckpt__load_enable=True
    )
    assert resumed.rc == 0, resumed.err
    assert_equal(weights(tmp_path / "out_a"), weights(tmp_path / "out_b"))
    if name == "critic":
        assert_equal(weights(tmp_path / "out_a_critic"), weights(tmp_path / "out_b_critic"))
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "b" / "global_step6" / "critic", num_labels=1)
    assert history(tmp_path / "run") == history(tmp_path / "first", after=4) != []
    if waits:
        (record,) = (r for r in history(tmp_path / "first") if (r["step"], r["kind"]) == (4, "train"))
        assert record["rollout/buffered"] > 0, "there was something to keep"
        assert record.get("curriculum/seen", 0) > 0 or name != "curriculum"
    AutoModelForCausalLM.from_pretrained(tmp_path / "b" / "global_step6" / "actor")


def test_it_continues_a_universal_checkpoint_to_the_bit(cli, tmp_path):
    """What DeepSpeed would have of round 4 of 6 is the actor, the critic, the rounds and the prompts that were taken:
    with a fixed KL coefficient that is all there is. From then on checkpoints are our own, and go first."""
    flags = RUN | VARIANTS["critic"] | {"train__max_epochs": 2, "algo__kl__init_coef": 0.1}
    straight = cli(**flags, ckpt__path=tmp_path / "a", ckpt__output_dir=tmp_path / "out_a")
    assert straight.rc == 0, straight.err
    theirs = rewritten(tmp_path / "a" / "global_step4", tmp_path / "b", rounds=4, prompts=16)
    (tmp_path / "run").rename(tmp_path / "first")
    flags |= {"ckpt__path": theirs, "ckpt__output_dir": tmp_path / "out_b", "ckpt__load_enable": True}

    begun = cli(**flags, ds__use_universal_ckpt=True)
    assert begun.rc == 0, begun.err
    assert "continues from" in begun.err
    assert "_actor/global_step4_uni" in begun.err
    assert_equal(weights(tmp_path / "out_a"), weights(tmp_path / "out_b"))
    assert_equal(weights(tmp_path / "out_a_critic"), weights(tmp_path / "out_b_critic"))
    assert history(tmp_path / "run") == history(tmp_path / "first", after=4) != []
    assert (theirs / "_critic" / "latest_universal").exists()

    again = cli(**flags, ds__use_universal_ckpt=True)
    assert again.rc == 0, again.err
    assert "global_step6" in again.err


def test_universal_checkpoints_of_rl_that_cannot_be_continued_are_one_line(cli, tmp_path):
    """Without the flag; without the critic's; and an actor's that does not say how many rounds were done."""
    ran = cli(**RUN, ckpt__path=tmp_path / "a")
    assert ran.rc == 0, ran.err
    theirs = rewritten(tmp_path / "a" / "global_step4", tmp_path / "b", rounds=4, prompts=16)
    flags = RUN | {"ckpt__path": theirs, "ckpt__load_enable": True}
    (theirs / "_actor" / "global_step4").mkdir()
    (theirs / "_actor" / "global_step4" / "mp_rank_00_model_states.pt").touch()
    for more, said in [
        ({}, "holds checkpoints in DeepSpeed's format"),
        ({"ds__use_universal_ckpt": True} | VARIANTS["critic"], f"{theirs}/_critic/latest_universal cannot be read"),
    ]:
        ran = cli(**flags | more)
        assert ran.rc == 1
        assert said in ran.err
        assert "Traceback" not in ran.err
    states = theirs / "_actor" / "global_step4_uni" / "mp_rank_00_model_states.pt"
    torch.save({"global_steps": 4}, states)
    ran = cli(**flags, ds__use_universal_ckpt=True)
    assert ran.rc == 1
    assert "does not say how many rounds were done (global_step)" in ran.err


def test_killed_and_started_again_it_ends_the_same(cli, start_cli, run_cli, tmp_path):
    """SIGKILL after round 3; the checkpoint is that of round 2. The host of the reward file goes with its parent."""
    straight = cli(
        **RUN, ckpt__path=tmp_path / "a", ckpt__output_dir=tmp_path / "out_a", logger__run_dir=tmp_path / "first"
    )
    assert straight.rc == 0, straight.err
    flags = RUN | {"ckpt__path": tmp_path / "b", "ckpt__output_dir": tmp_path / "out_b", "ckpt__load_enable": True}
    process, metrics = start_cli(**flags), tmp_path / "run" / "metrics.jsonl"
    done = wait_until(
        lambda: process.poll() is not None or (metrics.exists() and len(history(tmp_path / "run")) >= 3), 120
    )
    assert done
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(history(tmp_path / "run")) < ROUNDS, "it was killed in time"
    again = run_cli(**flags, timeout=120)
    assert again.rc == 0, again.err
    assert_equal(weights(tmp_path / "out_a"), weights(tmp_path / "out_b"))
    assert history(tmp_path / "run") == history(tmp_path / "first")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train__seed": 7}, "--train.seed 42, now it is 7"),
        ({"rollout__batch_size": 8}, "--rollout.batch_size was 4, and is 8 now"),
        ({"rollout__n_samples_per_prompt": 4}, "--rollout.n_samples_per_prompt was 2, and is 4 now"),
        ({"train__batch_size": 4}, "--train.batch_size was 8, and is 4 now"),
        ({"data__max_samples": 6}, "made with 8 prompts, now there are 6"),
        (
            {"algo__advantage__estimator": "gae"},
            "what is trained was rl with actor, and is rl with actor and critic now",
        ),
    ],
)
def test_what_cannot_be_continued_is_one_line(cli, change, said):
    assert cli(**RUN).rc == 0
    ran = cli(**RUN | change, ckpt__load_enable=True)
    assert ran.rc == 1
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_another_model_of_the_same_shape_is_refused_and_another_learning_rate_is_said(cli, inputs, tmp_path):
    """Without a reference as well: the run that is asked for is not the one that would go on."""
    from openrlhf.demo.model import write_model

    assert cli(**RUN).rc == 0
    write_model(tmp_path / "other", seed=1)
    ran = cli(**RUN, actor__model_name_or_path=tmp_path / "other", ckpt__load_enable=True)
    assert ran.rc == 1
    assert "the digest of --actor.model_name_or_path's weights was" in ran.err
    changes = {"actor__adam__lr": 1e-4, "train__num_episodes": 4, "rollout__temperature": 0.5}
    ran = cli(**RUN | changes, ckpt__load_enable=True)
    assert ran.rc == 0, ran.err
    assert "--actor.adam.lr was 0.001 up to global_step6, and is 0.0001 from here on" in ran.err
    assert "--rollout.temperature was 1.0 up to global_step6, and is 0.5 from here on" in ran.err
    assert ran.err.count("from here on") == 3
    assert [r["actor_lr"] <= 1e-4 for r in read_metrics(ran.run_dir / "metrics.jsonl") if r["step"] > 6] == [True, True]
