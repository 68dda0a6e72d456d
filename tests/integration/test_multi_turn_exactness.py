"""A real engine and a real forward agree about multi-turn episodes, token by token."""

import asyncio
import dataclasses
import random

import pytest
import torch
from scripted_engine import bpe_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM
from vision_models import image, vision_tokenizer, write_vision_model

from openrlhf.agents.multi_turn import MultiTurnAgentExecutor
from openrlhf.agents.user_agent import load_agent
from openrlhf.config.backend import InferenceBackendSection
from openrlhf.models.attention import ATTENTION
from openrlhf.models.loading import LoadSettings, load_policy
from openrlhf.models.policy import Policy
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import PackedTokens, PlacedImage, SamplingParams
from openrlhf.utils.agent import AgentInstanceBase, next_user_turn

OWN_LOOP = """
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens, ranges = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"], []
        for _ in range(3):
            said = (await llm_engine.generate(tokens, sampling_params)).token_ids
            ranges.append((len(tokens), len(tokens) + len(said)))
            tokens = tokens + said + hf_tokenizer(" higher!", add_special_tokens=False)["input_ids"]
        return {"observation_tokens": tokens, "action_ranges": ranges, "reward": 1.0}
"""


class Heckler(AgentInstanceBase):
    """Four turns of feedback that the tokenizer would have merged with the action, had it been tokenised with it."""

    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        feedback = random.Random(states["observation_text"]).choice(["her", "er than", " the", "12", "\n", ""])
        return {"rewards": self.turn, "environment_feedback": feedback, "done": self.turn == 4}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation=ATTENTION).eval()


@pytest.mark.parametrize("kind", ["multi turn", "own loop"])
def test_a_rescore_of_the_recorded_tokens_gives_the_rollouts_logprobs(model, tmp_path, kind):
    if kind == "own loop":
        file = tmp_path / "agent.py"
        file.write_text(OWN_LOOP)
        player = load_agent(file)
    else:
        player = MultiTurnAgentExecutor(Heckler)

    async def play_all():
        engine = EmbeddedEngine(model, bpe_tokenizer(), max_model_len=120, max_batch_size=5)
        return await asyncio.gather(
            *(
                player.play(f"guess {seed}", "", SamplingParams(seed=seed, max_tokens=12), 60, bpe_tokenizer(), engine)
                for seed in range(12)
            )
        )

    episodes = asyncio.run(play_all())
    segments = [segment for episode in episodes for segment in episode.segments]
    assert len(segments) == 12
    assert min(len(set(segment.turn_rewards.tolist())) for segment in segments) >= 2
    with torch.no_grad():
        rescored_A = Policy(model)(PackedTokens.from_segments(segments), temperature=1.0).logprobs_A
    rollout_A = torch.cat([segment.rollout_logprobs[segment.action_mask] for segment in segments])
    assert torch.allclose(rescored_A, rollout_A, atol=1e-4)
    # Text would have lost this: what the policy sampled is not what its text tokenises to.
    tokenizer = bpe_tokenizer()
    ids = [segment.token_ids.tolist() for segment in segments]
    assert any(tokenizer(tokenizer.decode(i), add_special_tokens=False)["input_ids"] != i for i in ids)


class Shows(AgentInstanceBase):
    """Three turns, each answered by an image of another size; what it shows depends on what was said."""

    def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        seed = random.Random(states["action_text"]).randrange(100)
        shown = [image(seed, width=16 + 8 * self.turn, height=24)]
        feedback = next_user_turn(states["tokenizer"], "no <image> look", after=states["action_text"])
        return {
            "rewards": self.turn,
            "done": self.turn == 3,
            "environment_feedback": feedback,
            "environment_images": shown,
        }


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_a_rescore_of_episodes_with_images_gives_the_rollouts_logprobs(tmp_path, kind):
    """Four prompts with an image each, three samples of each: packed, with prompts and their images shared."""
    settings = LoadSettings(device="cpu", ds=InferenceBackendSection(param_dtype="fp32"), images=True)
    policy = load_policy(write_vision_model(kind, tmp_path), settings)
    tokenizer = vision_tokenizer(kind)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]}],
        tokenize=False,
        add_generation_prompt=True,
    )
    player = MultiTurnAgentExecutor(Shows)

    async def play_all():
        engine = EmbeddedEngine(policy.model, tokenizer.tokenizer, max_model_len=400, max_batch_size=5)
        return await asyncio.gather(
            *(
                player.play(
                    prompt, "", SamplingParams(seed=seed, max_tokens=8), 400, tokenizer, engine, [image(seed // 3)]
                )
                for seed in range(12)
            )
        )

    segments = [segment for episode in asyncio.run(play_all()) for segment in episode.segments]
    assert [len(segment.images) for segment in segments] == [3] * 12
    with torch.no_grad():
        rescored_A = policy(PackedTokens.from_segments(segments), temperature=1.0).logprobs_A
    rollout_A = torch.cat([segment.rollout_logprobs[segment.action_mask] for segment in segments])
    assert torch.allclose(rescored_A, rollout_A, atol=1e-4)
    # Other images of the same size give other log-probs: they are read.
    swapped = [
        dataclasses.replace(s, images=(PlacedImage(s.images[0].start, other.images[0].image), *s.images[1:]))
        for s, other in zip(segments, segments[3:] + segments[:3], strict=True)
    ]
    with torch.no_grad():
        unlike_A = policy(PackedTokens.from_segments(swapped), temperature=1.0).logprobs_A
    assert (unlike_A - rollout_A).abs().max() > 1e-2
