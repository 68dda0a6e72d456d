"""A tiny model and a beginner's dialogues for a BFCL world, so that RL has something to improve on a CPU.

    openrlhf worlds install bfcl
    python examples/bfcl/prepare.py runs/bfcl

The beginner plays every task in the real world, knows the calls that solve it, and makes mistakes: another tool,
another name of an argument, another value, an argument left out. What the world answers is in the dialogues too.
"""

import argparse
import asyncio
import json
import random
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from openrlhf.worlds.base import WorldSettings, parse_options
from openrlhf.worlds.environments import find_python
from openrlhf.worlds.process import WorldProcess

WORLD = "openrlhf.worlds.bfcl"
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
# Of the tools it shows the names: their documents are longer than all else, and this model learns calls by heart.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | map(attribute='function.name') | join(' ')) + '<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{{ '<|im_start|>tool\\n' + message.content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def mistaken(call, names, values, rng):
    """The call with a mistake."""
    arguments = dict(call["arguments"])
    kinds = ["tool", *(["key", "value", "left out"] if arguments else [])]
    kind = rng.choice(kinds)
    if kind == "tool":
        return {"name": rng.choice(names), "arguments": arguments}
    key = rng.choice(list(arguments))
    if kind == "value":
        arguments[key] = rng.choice(values)
    else:
        value = arguments.pop(key)
        if kind == "key":
            arguments[rng.choice(("path", "name", "text"))] = value
    return {"name": call["name"], "arguments": arguments}


async def play(process, record, values, rng, *, share):
    """The messages of an episode, and its tools."""
    episode = await process.begin(record["label"], seed=0)
    names = [tool["function"]["name"] for tool in episode.start.tools]
    messages = list(episode.start.messages)
    left = (await process.call("solution", record["label"]))[0]
    for _ in range(2):
        if not left:
            break
        calls = [mistaken(call, names, values, rng) if rng.random() < share else call for call in left]
        told = [{"id": str(number), **call} for number, call in enumerate(calls)]
        messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call} for call in calls],
            }
        )
        turn = await episode.step({"role": "assistant", "content": "", "tool_calls": told})
        messages += turn.messages
        left = [call for call, did in zip(left, calls, strict=True) if call != did] if rng.random() < 0.5 else []
    messages.append({"role": "assistant", "content": "Done."})
    await episode.close()
    return messages, episode.start.tools


def make_tokenizer(texts):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=[AddedToken(token, normalized=False, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=TEMPLATE
    )


def make_model(tokenizer, seed):
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


async def dialogues(process, count, rng, share):
    records = {record["label"]: record for record in process.records(count=1000, seed=0)}
    solutions = [await process.call("solution", label) for label in records]
    calls = [call for turns in solutions for call in turns[0]]
    values = [value for call in calls for value in call["arguments"].values()]
    print(f"{len(records)} tasks, {len(calls)} calls solve them")
    return [await play(process, records[label], values, rng, share=share) for label in records for _ in range(count)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--options", default="turns=1", help="--world.options of the run")
    parser.add_argument("--dialogues", type=int, default=16, help="of each task (default 16)")
    parser.add_argument("--mistakes", type=float, default=0.5, help="share of calls with one (default 0.5)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    settings = WorldSettings(options=parse_options(given.options))
    process = WorldProcess(WORLD, settings, python=find_python(WORLD), timeout=60.0)
    played = asyncio.run(dialogues(process, given.dialogues, rng, given.mistakes))
    process.close()
    names = " ".join(tool["function"]["name"] for _, tools in played for tool in tools)
    said = [str(message["content"]) for messages, _ in played for message in messages]
    calls = [json.dumps(message.get("tool_calls", "")) for messages, _ in played for message in messages]
    tokenizer = make_tokenizer([names, *said, *calls])
    records, longest = [], 0
    for messages, tools in played:
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                before = tokenizer.apply_chat_template(messages[:at], tools, tokenize=False, add_generation_prompt=True)
                after = tokenizer.apply_chat_template(messages[: at + 1], tools, tokenize=False)
                records.append({"input": before, "output": after[len(before) :].removesuffix("<|im_end|>\n")})
                longest = max(longest, len(tokenizer(after)["input_ids"]))
    rng.shuffle(records)
    given.folder.mkdir(parents=True, exist_ok=True)
    (given.folder / "dialogues.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer.save_pretrained(given.folder / "untrained")
    make_model(tokenizer, given.seed).save_pretrained(given.folder / "untrained")
    print(f"{len(records)} answers of a beginner, {longest} tokens at most: {given.folder}/dialogues.jsonl")


if __name__ == "__main__":
    main()
