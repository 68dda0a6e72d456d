"""Mathematics: is what the last \\boxed{…} holds equal to the label?

    openrlhf rl --reward.remote_url examples/python/math_reward_func.py --data.label_key answer …

`grade_answer` knows that 1/2, 0.5, 50\\% and \\frac{1}{2} are the same, and x+1 and 1+x. It never takes longer than its
time limit, in any thread, so a model cannot stop training with 9^{9^{9^9}}. The label may be a bare answer or a whole
solution with a box of its own.
"""

from openrlhf.utils import extract_boxed_answer, grade_answer


def reward_func(queries, prompts, labels):
    correct, boxed = [], []
    for query, prompt, label in zip(queries, prompts, labels, strict=True):
        # The prompt may show a box too, as an example.
        answer = extract_boxed_answer(query[len(prompt) :])
        boxed.append(answer is not None)
        correct.append(grade_answer(answer, label))
    return {"rewards": correct, "scores": correct, "extra_logs": {"boxed": boxed}}
