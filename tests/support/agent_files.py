"""Agent files, whole but for what a test wants to be wrong with them."""

HEAD = """\
import torch
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase, MultiTurnAgentExecutor
"""

MULTI_TURN = """\
class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


def env(
    step: str = "return {'rewards': 1, 'done': True}", *, reset: str = "return states", init: str = "self.n = 0"
) -> str:
    return f"""\
class AgentInstance(AgentInstanceBase):
    def __init__(self):
        {init}
    async def reset(self, states):
        {reset}
    async def step(self, states):
        {step}
{MULTI_TURN}"""


def execute(result: str) -> str:
    return f"""\
class AgentExecutor(AgentExecutorBase):
    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        ids = hf_tokenizer(prompt)["input_ids"]
        said = (await llm_engine.generate(ids, sampling_params)).token_ids
        tokens, ranges = ids + said, [(len(ids), len(ids) + len(said))]
        {result}
"""


def answer(**changes: str) -> str:
    given = {"observation_tokens": "tokens", "action_ranges": "ranges", "reward": "1"} | changes
    return execute("return {" + ", ".join(f"'{key}': {value}" for key, value in given.items()) + "}")
