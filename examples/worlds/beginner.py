"""A tiny model and a beginner's dialogues for a world of tools, so that RL has something to improve on a CPU.

    openrlhf worlds install bfcl
    python examples/worlds/beginner.py bfcl runs/bfcl --options turns=1

The beginner plays every task in the real world, knows the calls that solve it and the answer, and makes mistakes:
another tool, another name of an argument, another value, an argument left out, another answer. What the world says to
that is in the dialogues too.

bfcl    the package's tasks, whose solutions it has
mcp     the shop of examples/mcp: the calls are the items of the question, the answer is the record's label
"""

import argparse
import asyncio
import json
import random
import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from openrlhf.worlds.base import WorldSettings, parse_options
from openrlhf.worlds.environments import find_python
from openrlhf.worlds.process import WorldProcess

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


async def solve_bfcl(process, record):
    return (await process.call("solution", record["label"]))[0], "Done."


async def solve_mcp(process, record):
    items = re.findall(r"one (\w+)", record["input"][-1]["content"])
    return [{"name": "price", "arguments": {"item": item}} for item in items], str(record["label"]["label"])


SOLVE = {"bfcl": solve_bfcl, "mcp": solve_mcp}
"""By world: the calls that solve a record, and the answer after them."""


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


async def play(process, record, solution, others, rng, *, share):
    """The messages of an episode, and its tools. `others`: values and answers of other records."""
    left, answer = solution
    values, answers = others
    episode = await process.begin(record["label"], seed=0)
    names = [tool["function"]["name"] for tool in episode.start.tools]
    messages = list(episode.start.messages)
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
    wrong = [other for other in answers if other != answer]
    if wrong and rng.random() < share:
        answer = rng.choice(wrong)
    messages.append({"role": "assistant", "content": answer})
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


async def dialogues(process, solve, count, rng, share):
    drawn = {json.dumps(record["label"]): record for record in process.records(count=1000, seed=0)}
    records = list(drawn.values())
    solutions = [await solve(process, record) for record in records]
    calls = [call for called, _ in solutions for call in called]
    others = [value for call in calls for value in call["arguments"].values()], [answer for _, answer in solutions]
    print(f"{len(records)} tasks, {len(calls)} calls solve them")
    return [
        await play(process, record, solution, others, rng, share=share)
        for record, solution in zip(records, solutions, strict=True)
        for _ in range(count)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", choices=SOLVE)
    parser.add_argument("folder", type=Path, help="where dialogues.jsonl and the untrained model go")
    parser.add_argument("--options", help="--world.options of the run")
    parser.add_argument("--dialogues", type=int, default=16, help="of each task (default 16)")
    parser.add_argument(
        "--mistakes", type=float, default=0.5, help="share of calls and of answers with one (default 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    settings = WorldSettings(options=parse_options(given.options) if given.options else {})
    world = f"openrlhf.worlds.{given.world}"
    process = WorldProcess(world, settings, python=find_python(world), timeout=60.0)
    played = asyncio.run(dialogues(process, SOLVE[given.world], given.dialogues, rng, given.mistakes))
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
