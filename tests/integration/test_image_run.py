"""Runs of image-text models by the command as users call it: what the engine and the trainer see is the same, images
included, in single turns and in episodes whose environment shows an image at every turn."""

import json
import shutil
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import pytest
import torch
from prepared_images import png
from safetensors.torch import load_file
from small_sections import loading
from vision_models import TURNS, image, png_that_says, write_vision_model

from openrlhf.checkpoint.export import export_value_model
from openrlhf.config import parse
from openrlhf.models.image_processor import ImageProcessor
from openrlhf.models.loading import load_policy, load_tokenizer, load_value_model
from openrlhf.models.value import sequence_ends
from openrlhf.models.vision import reads_images
from openrlhf.observability.loggers import read_metrics, without_times
from openrlhf.observability.rollout_log import RolloutLog
from openrlhf.runs.rl_assembly import train
from openrlhf.types import PackedTokens

pytestmark = pytest.mark.slow

CLOSE = 1e-5
"""Log-probs of engine and trainer are on the average at most so far apart, in fp32 (1e-6 was seen, and 2e-6 of vLLM)."""
REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
"""
"""Different for nearly every answer, so that every round has a gradient."""
QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of a model of some kind, made once."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def get(kind):
        if kind not in made:
            made[kind] = write_vision_model(kind, folder / kind)
            tokenizer = load_tokenizer(made[kind])
            tokenizer.chat_template = TURNS.replace("{{ IMAGE }}", "<image>" if kind == "llava" else QWEN_MARK)
            tokenizer.save_pretrained(made[kind])
        return made[kind]

    return get


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Eight prompts with 0, 1 or 2 images each, in files of several sizes beside the data."""
    folder = tmp_path_factory.mktemp("prompts")
    records, number = [], 0
    for i in range(8):
        files = []
        for _ in range((1, 0, 2)[i % 3]):
            width, height = ((24, 16), (16, 32), (40, 16))[number % 3]
            image(number, width=width, height=height).save(folder / f"{number}.png")
            files.append(f"{number}.png")
            number += 1
        records.append({"input": f"look {'<image>' * len(files)} {i}", "label": "", "images": files})
    return write(folder / "train.jsonl", records)


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def run(cli, models, prompts, tmp_path):
    """Two rounds of four prompts, with a learning rate so large that old weights in the engine would be noticed."""
    (tmp_path / "reward.py").write_text(REWARD)

    def start(kind, *words, **overrides):
        flags = {
            "actor__model_name_or_path": models(kind),
            "data__prompt_dataset": prompts,
            "data__max_images_per_prompt": 2,
            "data__max_len": 64,
            "data__apply_chat_template": True,
            "reward__remote_url": tmp_path / "reward.py",
            "actor__adam__lr": 1e-3,
            "actor__lr_scheduler": "constant",
        }
        return cli(*words, **flags | overrides)

    return start


def train_records(ran):
    return [r for r in ran.metrics if r["kind"] == "train"]


def check_learned(ran, *, rounds=2):
    """Rounds without a failure, with gradients, whose engine had the weights, pixels and positions of the trainer."""
    assert ran.rc == 0, ran.err
    records = train_records(ran)
    assert len(records) == rounds
    assert [r["rollout/failed"] for r in records] == [0] * rounds, ran.err
    assert min(r["actor_grad_norm"] for r in records) > 0
    gaps = [r["logprobs_diff"] for r in records if "logprobs_diff" in r]
    assert gaps
    assert max(gaps) < CLOSE


def weights(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


WAYS = {
    "critic and reference": (
        "qwen2_5_vl",
        {
            "algo__advantage__estimator": "gae",
            "algo__kl__init_coef": 0.01,
            "critic__adam__lr": 1e-3,
            "critic__save_value_network": True,
        },
    ),
    "frozen tower": ("qwen3_vl", {"actor__freeze_visual_encoder": True}),
    "adapter": ("llava", {"ds__lora__rank": 4, "actor__adam__lr": 1e-2}),
    "dynamic batches": ("llava", {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 128}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_with_images(run, models, way):
    """Prompts with none, one and two images in the same batches. What is saved can be loaded, with its processor."""
    kind, overrides = WAYS[way]
    ran = run(kind, **overrides)
    check_learned(ran)
    first, second = train_records(ran)
    out, before = ran.run_dir.with_name("out"), weights(models(kind))
    if way == "adapter":
        assert any(t.any() for name, t in weights(out).items() if "lora_B" in name and "vision" in name)
        return
    after = weights(out)
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    of_tower = {name for name in before if "vis" in name}
    assert moved - of_tower
    assert bool(moved & of_tower) == (way != "frozen tower")
    if way == "critic and reference":
        assert first["kl"] == pytest.approx(0, abs=1e-6)
        assert second["kl"] != 0
        assert min(first["critic_loss"], second["critic_loss"]) > 0
        assert any("vis" in name for name in weights(out.with_name("out_critic")))
    assert reads_images(load_policy(out, replace(loading(), images=True)).model.base_model)
    read = [ImageProcessor.load(folder, load_tokenizer(folder)).prepare(image(1)) for folder in (models(kind), out)]
    assert read[0].digest == read[1].digest


def test_a_run_that_was_interrupted_ends_as_one_that_was_not(run, tmp_path):
    """To the bit, after round 2 of 4."""
    flags = {"train__num_episodes": 2, "ckpt__save_steps": 2}
    straight = run("qwen2_5_vl", **flags, ckpt__path=tmp_path / "a", ckpt__output_dir=tmp_path / "out_a")
    check_learned(straight, rounds=4)
    shutil.copytree(tmp_path / "a" / "global_step2", tmp_path / "b" / "global_step2")
    (tmp_path / "run").rename(tmp_path / "first")
    paths = {"ckpt__path": tmp_path / "b", "ckpt__output_dir": tmp_path / "out_b"}
    check_learned(run("qwen2_5_vl", **flags, **paths, ckpt__load_enable=True))
    one, other = weights(tmp_path / "out_a"), weights(tmp_path / "out_b")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # Images come from threads, so rows stand elsewhere in the engine's batch: last bits of its log-probs differ.
    first, again = ([without_times(r) for r in read_metrics(tmp_path / f / "metrics.jsonl")] for f in ("first", "run"))
    for mine, theirs in zip(again, first[-2:], strict=True):
        assert mine.pop("kind") == theirs.pop("kind")
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)


AGENT = """
import asyncio, contextlib, os, time, uuid
from pathlib import Path
import numpy as np
from PIL import Image
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, next_user_turn


def image(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 24, 3), dtype=np.uint8))


HERE, METRICS = Path(__file__).parent, Path(__file__).parent / "run" / "metrics.jsonl"


def is_among_first_two(label):
    for slot in (HERE / "first", HERE / "second"):
        with contextlib.suppress(FileExistsError):
            os.symlink(label, slot)
        if os.readlink(slot) == label:
            return True
    return False


async def outlive_a_push(label):
    first = is_among_first_two(label)
    if not first:
        (HERE / f"waiting {uuid.uuid4()}").touch()
    for _ in range(6000):
        if len(list(HERE.glob("waiting *"))) >= 4 if first else METRICS.exists() and METRICS.read_text():
            break
        await asyncio.sleep(0.02)


class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def reset(self, states, **kwargs):
        self.seed = 10 * int(states["label"])
        assert len(states["images"]) == 1
        return {"observation": states["observation"].replace("now", "now<image>"), "images": [image(self.seed)]}

    async def step(self, states, **kwargs):
        self.turn += 1
        if PARTIAL and self.turn == 2:
            await outlive_a_push(states["label"])
        return {
            "rewards": float(sum(map(ord, states["action_text"])) % 5),
            "environment_feedback": next_user_turn(states["tokenizer"], "see<image>", after=states["action_text"]),
            "environment_images": [image(self.seed + self.turn)],
            "done": self.turn == 4,
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
"""Of each episode the policy reads one image of the record's, one that `reset` adds, and one in each of three feedbacks;
nobody reads the feedback of the last turn.

With partial rollout four prompts are in play, two of which a round takes: these wait until the episodes of the two others
are in the middle too, and those until the round is trained and its weights are pushed."""
TURNS_PLAYED = 4


@pytest.fixture
def agent(tmp_path):
    """The flags of a run with this agent. No record has more than one image, an episode has five."""
    for i in range(8):
        image(1000 + i, width=16, height=32).save(tmp_path / f"{i}.png")
    records = [{"input": "<image>now", "label": str(i), "images": f"{i}.png"} for i in range(8)]
    data = write(tmp_path / "train.jsonl", records)

    def flags(*, partial):
        (tmp_path / "agent.py").write_text(f"PARTIAL = {partial}\n{AGENT}")
        return {
            "data__prompt_dataset": data,
            "data__max_images_per_prompt": 1,
            "data__max_len": AGENT_LENGTH,
            "train__agent_func_path": tmp_path / "agent.py",
            "reward__remote_url": "none",
            **(PARTIAL if partial else {}),
        }

    return flags


AGENT_LENGTH = 256
PARTIAL = {
    "train__async_enable": True,
    "train__partial_rollout_enable": True,
    "rollout__batch_size": 2,
    "rollout__vllm_generate_batch_size": 4,
    "train__batch_size": 4,
    "actor__adam__lr": 0,  # whatever version a token was sampled by, its log-prob is the same
}


@pytest.fixture
def played(monkeypatch):
    """Every trajectory that runs train on from here on, with its label."""
    found, write_lines = [], RolloutLog.write

    def write(self, step, groups):
        found.extend((group.prompt.label, trajectory) for group in groups for trajectory in group.trajectories)
        write_lines(self, step, groups)

    monkeypatch.setattr(RolloutLog, "write", write)
    return found


def check_episodes(played, model, *, partial):
    """Their tokens are those of one rendering of the whole conversation, with every image at its place."""
    versions = [trajectory.segments[0].versions[trajectory.segments[0].action_mask] for _, trajectory in played]
    assert sum(len(of_episode.unique()) > 1 for of_episode in versions) >= 4 * partial
    tokenizer = load_tokenizer(model)
    processor = ImageProcessor.load(model, tokenizer)
    assert sorted((label, t.key.sample) for label, t in played) == [(str(i), s) for i in range(8) for s in range(2)]
    for label, trajectory in played:
        (segment,) = trajectory.segments
        acts = zip(segment.action_mask.tolist(), segment.token_ids.tolist(), strict=True)
        turns = [[token for _, token in run] for acting, run in groupby(acts, key=itemgetter(0)) if acting]
        said = [tokenizer.decode(turn) for turn in turns]
        assert len(said) == TURNS_PLAYED
        seen = {"type": "image"}
        first = [seen, {"type": "text", "text": "now"}, seen]
        messages = [{"role": "user", "content": first}, {"role": "assistant", "content": said[0]}]
        for answer in said[1:]:
            messages.append({"role": "user", "content": [{"type": "text", "text": "see"}, seen]})
            messages.append({"role": "assistant", "content": answer})
        text = tokenizer.apply_chat_template(messages, tokenize=False).removesuffix("!")
        number = int(label)
        pictures = [image(1000 + number, width=16, height=32), *(image(10 * number + i) for i in range(TURNS_PLAYED))]
        expected = processor.expand(text, list(map(processor.prepare, pictures)))
        assert segment.token_ids.tolist() == expected.token_ids
        for mine, theirs in zip(segment.images, expected.images, strict=True):
            assert (mine.start, mine.image.digest) == (theirs.start, theirs.image.digest)
        assert not segment.rollout_logprobs[segment.action_mask].isnan().any()


@pytest.mark.parametrize(("kind", "partial"), [("qwen2_5_vl", False), ("qwen3_vl", True), ("llava", True)])
def test_an_agent_that_shows_images(run, models, agent, played, kind, partial):
    """In a process of its own, and with partial rollout in the run's."""
    ran = run(kind, **agent(partial=partial), rollout__agent_hosts=0 if partial else 1)
    check_learned(ran, rounds=4 if partial else 2)
    check_episodes(played, models(kind), partial=partial)


def test_a_reward_model_judges_what_the_policy_saw(run, models, played, tmp_path):
    """A random head on the same body: rewards are its values at the last token of each episode, images included."""
    settings = replace(loading(), images=True)
    judge = load_value_model(models("qwen2_5_vl"), settings)
    torch.nn.init.normal_(judge.head.weight, generator=torch.Generator().manual_seed(0))
    export_value_model(judge, load_tokenizer(models("qwen2_5_vl")), tmp_path / "judge")
    check_learned(run("qwen2_5_vl", reward__remote_url="", reward__model_name_or_path=tmp_path / "judge"))
    segments = [segment for _, trajectory in played for segment in trajectory.segments]
    seeing = [PackedTokens.from_segments([segment]) for segment in segments]
    blind = [PackedTokens.from_sequences([segment.token_ids], [segment.action_mask]) for segment in segments]
    with torch.no_grad():
        seen, unseen = ([judge(t, positions=sequence_ends(t)).item() for t in kind] for kind in (seeing, blind))
    assert [trajectory.reward for _, trajectory in played] == pytest.approx(seen, abs=1e-4)
    moved = [segment.images for segment, a, b in zip(segments, seen, unseen, strict=True) if abs(a - b) > 0.01]
    assert len(moved) == sum(bool(segment.images) for segment in segments)
    assert all(moved)


BROKEN = {
    "missing": (None, "there is no image file x.png"),
    "truncated": (png(image(0))[:-60], "is truncated or broken"),
    "bomb": (png_that_says(100_000, 100_000), "is a decompression bomb, or far too large"),
    "empty": (png_that_says(0, 0), "has 0 × 0 pixels"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_image_ends_the_run_with_a_line_that_names_its_record(run, tmp_path, name):
    content, said = BROKEN[name]
    if content is not None:
        (tmp_path / "x.png").write_bytes(content)
    image(1).save(tmp_path / "ok.png")
    records = [{"input": "<image>", "label": "", "images": file} for file in ["ok.png"] * 6 + ["x.png", "ok.png"]]
    refused(run("qwen2_5_vl", data__prompt_dataset=write(tmp_path / "bad.jsonl", records)), "record 7", said)


def refused(ran, *parts):
    assert ran.rc == 1, ran.err
    assert len(ran.errors) == 1, ran.err
    for part in parts:
        assert part in ran.errors[0]
    assert "Traceback" not in ran.err
    assert not (ran.run_dir / "metrics.jsonl").exists()


def test_records_and_models_that_cannot_go_together(run, inputs, tmp_path):
    refused(
        run("qwen2_5_vl", actor__model_name_or_path=inputs.model), "this model reads no images", "--data.max_images"
    )
    refused(run("qwen2_5_vl", data__max_images_per_prompt=1), "record 3", "--data.max_images_per_prompt is 1")
    spelled = write(tmp_path / "spelled.jsonl", [{"input": "a <|image_pad|> b", "label": ""}] * 8)
    refused(run("qwen2_5_vl", data__prompt_dataset=spelled), "record 1", "<|image_pad|>")


@pytest.fixture(scope="module")
def image_cluster(inputs, models, tmp_path_factory):
    """Ray, and two vLLM engines that read images."""
    from shared_cluster import shared_cluster

    folder = tmp_path_factory.mktemp("cluster")
    flags = {"actor__model_name_or_path": models("qwen2_5_vl"), "data__max_len": AGENT_LENGTH}
    words = inputs.flags(folder / "run", **flags, data__max_images_per_prompt=1, vllm__num_engines=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        with shared_cluster(parse("train_ppo_ray", words), folder) as cluster:
            yield cluster


@pytest.mark.parametrize("partial", [False, True])
def test_the_same_agent_on_ray_and_vllm(inputs, models, agent, played, image_cluster, tmp_path, partial):
    """Two ranks that share their parameters out, and two engines."""
    flags = {
        "train__launcher": "ray",
        "actor__num_gpus_per_node": 2,
        "ds__zero_stage": 3,
        "vllm__num_engines": 2,
        "vllm__sync_verify": True,
        "actor__model_name_or_path": models("qwen2_5_vl"),
        "actor__adam__lr": 1e-3,
        "actor__lr_scheduler": "constant",
        "data__apply_chat_template": True,
        "algo__advantage__is_correction_enable": True,  # so that every token has its log-prob
        **agent(partial=partial),
    }
    config = parse("train_ppo_ray", inputs.flags(tmp_path / "run", **flags))
    run_dir = train(config, make_launcher=image_cluster.make_launcher).run_dir
    records = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["rollout/failed"] for r in records] == [0] * (4 if partial else 2)
    assert min(r["actor_grad_norm"] for r in records) > 0
    assert max(r["logprobs_diff"] for r in records) < CLOSE
    assert max(r["sync/probe_gap"] for r in records) < 1e-4
    check_episodes(played, models("qwen2_5_vl"), partial=partial)
