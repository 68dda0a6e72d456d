"""Real runs of programs that use the `openai` client, in host processes."""

import json
from pathlib import Path

import pytest
from chat_model import chat_model, chat_tokenizer

from openrlhf.observability.loggers import read_metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "python" / "agent_func_openai_server_executor.py"

REWRITES_AND_BLOCKS = """
import openai
from openrlhf.utils.agent import OpenAIServerAgentExecutor

class AgentExecutor(OpenAIServerAgentExecutor):
    async def run_agent(self, prompt, label, base_url):
        client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)  # not async: it blocks its loop
        messages = [{"role": "user", "content": prompt}]
        for _ in range(2):
            said = "".join(
                chunk.choices[0].delta.content or ""
                for chunk in client.chat.completions.create(model="m", messages=messages, stream=True)
            )
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
        messages[1]["content"] = "(shortened)"
        client.chat.completions.create(model="m", messages=messages)
        return {"reward": float(len(said) % 2), "scores": 0.5}
"""

OWN_SERVER_THREAD = """
import asyncio, threading
from openrlhf.utils.agent import AgentExecutorBase

class AgentExecutor(AgentExecutorBase):
    \"\"\"As executors do that bring an HTTP server of their own: requests are answered in a thread with its own loop.\"\"\"

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def execute(self, prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images=None):
        tokens, ranges = hf_tokenizer(prompt, add_special_tokens=False)["input_ids"], []
        for _ in range(2):
            asked = asyncio.run_coroutine_threadsafe(llm_engine.generate(tokens, sampling_params), self.loop)
            said = (await asyncio.wrap_future(asked)).outputs[0].token_ids
            ranges.append((len(tokens), len(tokens) + len(said)))
            tokens = tokens + said + hf_tokenizer(" more", add_special_tokens=False)["input_ids"]
        return {"observation_tokens": tokens, "action_ranges": ranges, "reward": len(said), "scores": 0.5}
"""


@pytest.fixture(scope="module")
def chat_inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = chat_tokenizer()
    chat_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    records = [{"input": f"What is {i} + 2?", "label": str(i + 2)} for i in range(4)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return folder


def run(cli, chat_inputs, file, *words, **overrides):
    """One round of 4 prompts, 2 samples each."""
    flags = {
        "train__agent_func_path": file,
        "actor__model_name_or_path": chat_inputs / "model",
        "data__prompt_dataset": chat_inputs / "sums.jsonl",
        "data__max_len": 420,
        "rollout__max_new_tokens": 8,
        "reward__remote_url": "none",
        "actor__entropy_coef": 0,  # all samples run, those without an advantage too
    }
    ran = cli(*words, **flags | overrides)
    assert ran.rc == 0, ran.err
    (record,) = (r for r in read_metrics(ran.run_dir / "metrics.jsonl") if r["kind"] == "train")
    assert record["rollout/failed"] == 0
    assert record["logprobs_diff"] < 1e-4
    return ran, record


@pytest.mark.parametrize("hosts", [None, 0])
def test_the_example_trains(cli, chat_inputs, hosts):
    _, record = run(cli, chat_inputs, EXAMPLE, **({} if hosts is None else {"rollout__agent_hosts": hosts}))
    assert record["calculations"] == 0.0  # weights are random: nobody calls anything


def test_a_program_that_rewrites_its_history_and_blocks_its_loop_trains(cli, chat_inputs, tmp_path):
    """Two turns of one segment, then one of another. Its server answers while the loop of the episodes is blocked."""
    file = tmp_path / "agent.py"
    file.write_text(REWRITES_AND_BLOCKS)
    ran, record = run(cli, chat_inputs, file)
    assert record["score"] == 0.5
    assert record["response_length"] > 8
    assert "Traceback" not in ran.err


def test_an_executor_with_a_server_thread_of_its_own_trains(cli, chat_inputs, tmp_path):
    file = tmp_path / "agent.py"
    file.write_text(OWN_SERVER_THREAD)
    _, record = run(cli, chat_inputs, file, rollout__agent_hosts=0)
    assert record["score"] == 0.5
