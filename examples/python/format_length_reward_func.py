"""A mix: the answer counts most, its form a little, and answers that ramble on cost something.

    openrlhf rl --reward.remote_url examples/python/format_length_reward_func.py --data.label_key answer …

Answers are expected as <think>…</think><answer>…</answer>. Each part is logged by itself (`format`, `correct`,
`overlong`), so that one can see which of them the policy learns. `scores` is correctness alone: filtering and pass@k
should not depend on style.

Parts that are files of their own can be mixed on the command line instead:

    --reward.remote_url correct.py,format.py,http://judge:5000/get_reward --reward.weights 1 0.2 0.5
"""

import re

FORMAT = re.compile(r"\s*<think>.+?</think>\s*<answer>(.+?)</answer>\s*", re.DOTALL)

CORRECT, FORMATTED, OVERLONG = 1.0, 0.2, -0.5
"""What each part is worth."""
FREE_CHARACTERS, MOST_CHARACTERS = 2000, 4000
"""Up to the first, length is free; from the second on it costs all of `OVERLONG`."""
END_OF_TEXT = re.compile(r"(?:<\|[a-z_]+\|>|</s>|<eos>)+\s*$")
"""Special tokens are part of the text that rewards see."""


def overlong(length):
    """0 for free, 1 for the most, a straight line in between."""
    return min(max(length - FREE_CHARACTERS, 0) / (MOST_CHARACTERS - FREE_CHARACTERS), 1.0)


def reward_func(queries, prompts, labels):
    correct, formatted, too_long = [], [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        response = END_OF_TEXT.sub("", query[len(prompt) :])
        match = FORMAT.fullmatch(response)
        formatted.append(1.0 if match else 0.0)
        correct.append(1.0 if match and match.group(1).strip() == str(label).strip() else 0.0)
        too_long.append(overlong(len(response)))
    rewards = [
        CORRECT * right + FORMATTED * good + OVERLONG * long
        for right, good, long in zip(correct, formatted, too_long, strict=True)
    ]
    return {
        "rewards": rewards,
        "scores": correct,
        "extra_logs": {"correct": correct, "format": formatted, "overlong": too_long},
    }
