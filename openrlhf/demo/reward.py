"""The demo's reward, in the form every user's reward file has: 1 for the right order, 0 for anything else."""


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, list[float]]:
    """`queries[i]` is `prompts[i]` followed by the response, special tokens included."""
    answers = [query[len(prompt) :] for query, prompt in zip(queries, prompts, strict=True)]
    rewards = [float(answer == f"{label}<eos>") for answer, label in zip(answers, labels, strict=True)]
    return {"rewards": rewards, "scores": rewards}
