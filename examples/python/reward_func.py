"""A reward function file: is the final answer the label?

    python -m openrlhf.cli.train_ppo_ray --reward.remote_url examples/python/reward_func.py --data.label_key label …

`reward_func` is called once per prompt with the samples of that prompt: three lists of equal length, where
`queries[i]` is the prompt followed by response i, and `labels[i]` is the record's `--data.label_key` field. It may be
`async def`. It runs in a process of its own, which loads this file once, so keep caches and clients at module level;
calls for different prompts overlap, in threads. What it prints goes to stderr.

It returns a dict (or just the rewards):

    rewards     what training maximises, one number per sample
    scores      success in [0, 1], for dynamic filtering and pass@k; the rewards if left out
    extra_logs  {name: one number per sample}, logged as means

Lists, tensors and arrays are all fine. A sample that cannot be judged should raise: a failure is counted and the
sample replaced, which is better than a made-up 0.
"""

import re

BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def extract_answer(response: str) -> str | None:
    """The last \\boxed{…}, else what follows the last "####", else the last number."""
    boxed = BOXED.findall(response)
    if boxed:
        return boxed[-1]
    if "####" in response:
        return response.rsplit("####", 1)[1]
    numbers = NUMBER.findall(response)
    return numbers[-1] if numbers else None


def same_answer(answer: str, label: str) -> bool:
    """Equal as numbers if both are numbers (so 1,000 = 1000.0), else as text."""
    answer, label = (text.strip().strip("$").rstrip(".").replace(",", "") for text in (answer, label))
    try:
        return float(answer) == float(label)
    except ValueError:
        return answer.lower() == label.lower()


def reward_func(queries, prompts, labels):
    rewards, answered, lengths = [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = query[len(prompt) :]
        answer = extract_answer(response)
        rewards.append(1.0 if answer is not None and same_answer(answer, str(label)) else 0.0)
        answered.append(answer is not None)
        lengths.append(len(response))
    return {
        "rewards": rewards,
        "scores": rewards,
        "extra_logs": {"answered": answered, "response_chars": lengths},
    }
