"""A cluster that somebody else has started, of two nodes, and a run that is submitted to it as documents show."""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.cluster.launch import WORKER
from openrlhf.demo.model import make_tokenizer

pytestmark = pytest.mark.slow

RAY = str(Path(sys.executable).with_name("ray"))
MODULE = "openrlhf.cli.train_ppo_ray"
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def short_path():
    """Ray keeps sockets there, whose paths may not be long."""
    with tempfile.TemporaryDirectory(prefix="ray") as path:
        yield path


@pytest.fixture
def nodes(tmp_path, short_path):
    """`ray start --head` with room for one worker, and a second raylet with room for two: (address of the dashboard,
    environment)."""
    port, dashboard = free_port(), free_port()
    environment = os.environ | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_TMPDIR": short_path,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    environment.pop("RAY_ADDRESS", None)
    room = ["--num-cpus=2", "--block", "--disable-usage-stats"]
    head = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", f"--dashboard-port={dashboard}"]
    starts = [[*head, *room, workers(1)], [f"--address=127.0.0.1:{port}", *room, workers(2)]]
    running = []
    try:
        for words in starts:
            words.append(f"--dashboard-agent-listen-port={free_port()}")  # one machine has its default but once
            said = (tmp_path / f"node{len(running)}.log").open("w")
            running.append(
                subprocess.Popen(
                    [RAY, "start", *words], env=environment, stdout=said, stderr=said, start_new_session=True
                )
            )
            wait_for(port if len(running) == 1 else dashboard)
        yield f"http://127.0.0.1:{dashboard}", environment
    finally:
        for process in reversed(running):
            os.killpg(process.pid, signal.SIGTERM)
        for process in running:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_a_submitted_run_trains_on_one_node_and_samples_on_the_other(inputs, nodes, tmp_path):
    """The engine has two parts, for which only the second node has room. Weights go there through a process group of
    actor and parts; after every push the engine's log-probs of a fixed sequence are the policy's."""
    address, environment = nodes
    words = inputs.flags(
        tmp_path / "run",
        actor__model_name_or_path=write_model(tmp_path / "model"),
        actor__num_gpus_per_node=1,
        vllm__num_engines=1,
        vllm__tensor_parallel_size=2,
        vllm__sync_backend="gloo",
        vllm__sync_verify=True,
        algo__advantage__estimator="reinforce",
        reward__remote_url=tmp_path / "reward.py",
        actor__adam__lr=1e-2,
        actor__lr_scheduler="constant",
    )
    (tmp_path / "reward.py").write_text(
        "def reward_func(queries, prompts, labels):\n    return [float(sum(map(ord, q)) % 5) for q in queries]\n"
    )
    # No working_dir: raylets of one machine share the folder it is copied to, and one throws away what the other uses.
    runtime = f"--runtime-env-json={json.dumps({'env_vars': {'VLLM_LOGGING_LEVEL': 'WARNING'}})}"
    command = [RAY, "job", "submit", f"--address={address}", runtime, "--", sys.executable, "-m", MODULE, *words]
    rc, said = submit(command, environment)
    assert rc == 0, said[-4000:]
    (actor,) = re.findall(r"actor on node (\w+)", said)
    (engine,) = re.findall(r"vllm on node (\w+)", said)
    assert actor != engine
    rounds = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rounds) == 2
    assert max(line["sync/probe_gap"] for line in rounds) < 1e-4
    assert min(line["actor_grad_norm"] for line in rounds) > 0


def workers(count: int) -> str:
    return f"--resources={json.dumps({WORKER: count})}"


def write_model(folder: Path) -> Path:
    """Its heads can be divided by two, and so can their keys."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def submit(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Exit status and output. A head node that is young may have nobody yet who takes jobs."""
    for _ in range(20):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        said = ran.stdout + ran.stderr
        if "No available agent to submit job" not in said:
            break
        time.sleep(2)
    return ran.returncode, said


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port: int, *, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"nobody listens on port {port} after {seconds:g} s")
