"""The workbench of a check: prompts, a model to answer them, and the sampling parameters of training.

Without a model of the user's it is one of a few thousand random weights that says readable nonsense: no download.
"""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.images import with_images
from openrlhf.checking.options import CheckOptions
from openrlhf.data.image_places import DataImages
from openrlhf.data.prompts import PromptSet
from openrlhf.data.sources import load_records
from openrlhf.data.templates import render_prompt, set_chat_template
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer, silence_progress_bars
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.runs.preflight import data_images, reading_model
from openrlhf.runs.worlds import world_plan, world_records
from openrlhf.types import Prompt, SamplingParams
from openrlhf.utils.randomness import derive_seed

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
"""How an image begins, the token that features take the place of, and how an image ends."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START}{{{{ message['role'] }}}}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}"
    f"{{% if item['type'] == 'image' %}}{''.join(IMAGE_TOKENS)}{{% else %}}{{{{ item['text'] }}}}{{% endif %}}"
    "{% endfor %}{% endif %}"
    f"{END}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{START}assistant\n{{% endif %}}"
)

SPEECH = "the answer is forty two or so i think, but it may be a 1, 2, 3, 4, 5, 6, 7, 8, 9 or 0. "
"""How often each character is said."""
HIDDEN, PATCH = 32, 14
RESPONSE_TOKENS = 24
"""How long a response is on average."""
WHISPER = 1e-6
"""How likely a token is that `SPEECH` does not have, relative to one that it has once."""

PROMPTS = (
    ("What is 2 + 3?", "5"),
    ("What is 12 * 12?", "144"),
    ("I think of a number from 1 to 100. Guess!", "42"),
    ("A week has how many days? Answer with a number.", "7"),
)
"""(text, label); labels that also int() and json.loads() can read."""


def builtin_prompts(tokenizer: Any = None) -> list[Prompt]:
    """The built-in prompts; with a tokenizer, in its chat template."""
    prompts = []
    for i, (question, label) in enumerate(PROMPTS):
        text = render_prompt({"input": question}, apply_chat_template=tokenizer is not None, tokenizer=tokenizer).text
        where = f"built-in prompt {i + 1} (--prompt_data takes yours)"
        prompts.append(Prompt(ordinal=i, text=text, label=label, where=where))
    return prompts


def write_tiny_model(directory: Path, *, images: bool = False) -> None:
    """A model folder as users have them; with `images` that of a model that reads some."""
    tokenizer = make_tokenizer(images=images)
    make_model(tokenizer, images=images).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if images:
        _image_processor().save_pretrained(directory)


def make_tokenizer(*, images: bool = False) -> Qwen2Tokenizer:
    """One token per byte, ChatML around messages: whatever text comes, it is read and written back."""
    tokens = [PAD, START, END, *sorted(ByteLevel.alphabet()), *(IMAGE_TOKENS if images else ())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START, *(IMAGE_TOKENS if images else ())],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: Qwen2Tokenizer, *, images: bool = False) -> Any:
    """Random weights, but for one hidden dimension: it is the same after every token, so that its column in the output
    layer is a bias, which is set to how often each token is said.
    """
    torch.manual_seed(0)
    model = _vision_model(tokenizer) if images else Qwen2ForCausalLM(Qwen2Config(**_decoder(tokenizer)))
    body = model.model.language_model if images else model.model
    with torch.no_grad():
        body.embed_tokens.weight[:, 0] = 3.0  # outweighs the rest, so that the last norm makes it nearly √hidden
        for layer in body.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = _log_frequencies(tokenizer) / math.sqrt(HIDDEN)
    return model


def _decoder(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _vision_model(tokenizer: Qwen2Tokenizer) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    start, picture, end = (tokenizer.get_vocab()[token] for token in IMAGE_TOKENS)
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    tower = {
        "depth": 1,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 8 * PATCH,
        "fullatt_block_indexes": [0],
        "out_hidden_size": HIDDEN,
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config={**_decoder(tokenizer), "rope_parameters": rope},
        vision_config=tower,
        vision_start_token_id=start,
        image_token_id=picture,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def _image_processor() -> Any:
    """An image has 4 to 64 tokens: as many as its size asks for, and few enough for many turns."""
    from transformers import Qwen2VLImageProcessorPil

    token = (2 * PATCH) ** 2
    size = {"shortest_edge": 4 * token, "longest_edge": 64 * token}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=size)


def _log_frequencies(tokenizer: Qwen2Tokenizer) -> torch.Tensor:
    """float32 [V]"""
    said = Counter(tokenizer(SPEECH, add_special_tokens=False)["input_ids"])
    counts = torch.tensor([said.get(token, WHISPER) for token in range(len(tokenizer))])
    counts[tokenizer.eos_token_id] = counts.sum() / RESPONSE_TOKENS
    return counts.log()


MOST_PROMPTS = 4
"""How many prompts of the user's data are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """The parts of a check that are the same for every file."""

    options: CheckOptions
    model_folder: str
    engine: EmbeddedEngine
    tokenizer: Any
    """That of the model; where images are read, with its image processor."""
    prompts: list[Prompt]

    def sampling_params(self, prompt: Prompt, sample: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.options.max_new_tokens, seed=derive_seed(0, "check", prompt.ordinal, sample)
        )

    def episode_settings(self) -> EpisodeSettings:
        return EpisodeSettings(
            agent_file=str(self.options.file),
            tokenizer=self.model_folder,
            use_fast=True,
            trust_remote_code=False,
            max_length=self.options.max_len,
            max_steps=self.options.max_steps,
            max_model_len=self.engine.max_model_len,
            images=self.options.max_images_per_prompt > 0,
            allow_image_urls=self.options.allow_image_urls,
            world=None if (run := self.options.world) is None else world_plan(run, str(self.options.file)),
        )


@contextlib.contextmanager
def workbench(options: CheckOptions) -> Iterator[Workbench]:
    """The user's model and prompts, or our own. Raises ModelLoadError or DataError."""
    silence_progress_bars()
    with contextlib.ExitStack() as held:
        folder, device = options.pretrain, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if folder is None:
            folder, device = held.enter_context(tempfile.TemporaryDirectory()), torch.device("cpu")
            write_tiny_model(Path(folder), images=options.max_images_per_prompt > 0)
        with reading_model(folder, flag="--pretrain"):
            tokenizer = load_tokenizer(folder, flag="--pretrain")
            tokenizer = set_chat_template(tokenizer, None, {}, needed=options.world is not None)
            images = data_images(folder, tokenizer, options, trust_remote_code=False, flag="--pretrain")
            settings = LoadSettings(device=device, flag="--pretrain", images=images is not None)
            policy = load_policy(folder, settings)
        yield Workbench(
            options=options,
            model_folder=folder,
            engine=EmbeddedEngine(policy.model, tokenizer, max_model_len=options.max_len),
            tokenizer=tokenizer
            if images is None
            else with_images(tokenizer, images.processor, allow_urls=options.allow_image_urls),
            prompts=_prompts(options, tokenizer, images),
        )


def _prompts(options: CheckOptions, tokenizer: Any, images: DataImages | None) -> list[Prompt]:
    run = options.world
    if options.prompt_data is None and run is None:
        return builtin_prompts(tokenizer if options.apply_chat_template else None)
    flag = "--prompt_data"
    prompts = PromptSet(
        load_records(
            options.prompt_data or str(options.file),
            max_samples=MOST_PROMPTS,
            worlds=None if run is None else functools.partial(world_records, run, evaluation=False),
            flag=flag,
        ),
        tokenizer=tokenizer,
        input_key=options.input_key,
        label_key=options.label_key or (run.label_key if run else None),
        apply_chat_template=options.apply_chat_template or run is not None,
        images=images,
        image_key=options.image_key,
        max_prompt_tokens=options.max_len - options.max_new_tokens,
        flag=flag,
    )
    return prompts[:MOST_PROMPTS]
