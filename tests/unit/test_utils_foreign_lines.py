"""What other libraries say on a run's terminal: errors always, a warning once, nothing that is known to be idle."""

import io
import json
import logging
import logging.config
import sys
import warnings
from pathlib import Path

import pytest
import torch

from openrlhf.models.loading import silence_progress_bars
from openrlhf.rollout.vllm.settings import logging_variables
from openrlhf.utils.foreign_lines import IDLE_WARNINGS, ForeignLines, filter_unhandled, start_logging


@pytest.fixture
def begin(monkeypatch):
    """Prepares a process that has just begun, without handlers and options: what it says on stderr."""

    def prepare(how, **options):
        stream = io.StringIO()
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "warnoptions", [])
        monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
        how(**options)
        return stream

    level = logging.getLogger().level
    with warnings.catch_warnings():
        yield prepare
    logging.getLogger().setLevel(level)


@pytest.fixture
def transformers_logger():
    """Its handlers and propagation are put back."""
    logger = logging.getLogger("transformers")
    handlers, propagate = list(logger.handlers), logger.propagate
    yield logger
    logger.handlers[:], logger.propagate = handlers, propagate


def say(name, level, *words):
    logging.getLogger(name).log(level, *words)


def test_errors_of_libraries_pass_every_time(begin):
    terminal = begin(start_logging)
    for _ in range(2):
        say("vllm.v1.engine.core", logging.ERROR, "EngineCore failed to start: %s", "no memory")
    assert terminal.getvalue() == "ERROR EngineCore failed to start: no memory\n" * 2


def test_a_warning_of_a_library_is_shown_once_whatever_its_numbers(begin):
    terminal = begin(start_logging)
    for number in range(3):
        say("vllm.core.scheduler", logging.WARNING, "Sequence %d is preempted", number)
    say("vllm.core.other", logging.WARNING, "Sequence %d is preempted", 7)
    assert terminal.getvalue() == "WARNING Sequence 0 is preempted\nWARNING Sequence 7 is preempted\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vllm.model_executor.model_loader.reload.layerwise", ("%s: Failed to load weights", "RotaryEmbedding")),
        ("vllm.model_executor.model_loader.reload.layerwise", ("%s: Failed to load weights", "YaRNRotaryEmbedding")),
        ("vllm.model_executor.model_loader.reload.layerwise", ("%s: Failed to load weights", "ParallelLMHead")),
        ("vllm.model_executor.model_loader.reload.layerwise", ("%s: Failed to load weights", "QKVParallelLinear")),
        ("vllm.config.model", ("Casting %s to %s.", torch.float32, torch.bfloat16)),
        (
            "vllm.config.scheduler",
            ("max_num_batched_tokens (%d) exceeds max_num_seqs * max_model_len (%d). This", 8, 4),
        ),
        ("vllm.reload.layerwise", ("Allocating %.1f MB of device memory to buffers to load %s layers.", 0.5, ["QKV"])),
        ("vllm.v1.worker.jit_monitor", ("Triton kernel JIT compilation during inference: %s. This", "_topk")),
        ("transformers.tokenization_utils", ("Ignoring clean_up_tokenization_spaces=True for BPE tokenizer",)),
        ("vllm.config", ("Enforce eager set, disabling torch.compile",)),
        ("bitsandbytes.backends.cpu.ops", ("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "none")),
    ],
)
def test_foreign_lines_leave_out_idle_warnings(begin, name, words):
    terminal = begin(start_logging)
    say(name, logging.WARNING, *words)
    assert terminal.getvalue() == ""


def test_pythons_own_warnings_that_mean_nothing_are_left_out(begin):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        begin(start_logging)
        texts = [f"{beginning}: ['x']." for beginning in IDLE_WARNINGS] + ["alpha_pattern is odd"]
        for text in texts:
            warnings.warn_explicit(text, RuntimeWarning, "tuners.py", 1, module="peft.tuners")
    assert [str(w.message) for w in found] == ["alpha_pattern is odd"]


def test_our_lines_and_the_users_are_all_shown(begin):
    terminal = begin(start_logging)
    for name in ("openrlhf.trainers.rl", "my_agent", "vllm_tools", "root"):
        for _ in range(2):
            say(name, logging.INFO, "%s", name)
    say("httpx", logging.INFO, "HTTP Request: GET")
    lines = terminal.getvalue().splitlines()
    assert lines == [f"INFO {n}" for n in ("openrlhf.trainers.rl", "my_agent", "vllm_tools", "root") for _ in range(2)]


def test_ranks_leave_warnings_of_libraries_to_the_main_one(begin):
    terminal = begin(start_logging, is_main=False)
    say("transformers.x", logging.WARNING, "the same on every rank")
    say("openrlhf.x", logging.INFO, "for the main rank")
    say("openrlhf.x", logging.WARNING, "this rank is slow")
    assert terminal.getvalue() == "WARNING this rank is slow\n"


def test_lines_of_transformers_take_the_same_way(begin, transformers_logger):
    terminal = begin(start_logging)
    silence_progress_bars()
    for _ in range(3):
        say("transformers.tokenization_utils_base", logging.WARNING, "Token indices sequence length is longer")
    assert terminal.getvalue() == "WARNING Token indices sequence length is longer\n"


@pytest.mark.parametrize("how", [start_logging, filter_unhandled])
def test_deprecations_are_the_business_of_who_maintains_the_library(begin, how):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        begin(how)
        for module in ("torch.distributed.c10d_logger", "vllm", "my_reward", "torchy"):
            for category in (FutureWarning, UserWarning):
                warnings.warn_explicit("old", category, f"{module}.py", 1, module=module)
    assert [w.filename for w in found if w.category is FutureWarning] == ["my_reward.py", "torchy.py"]
    assert len([w for w in found if w.category is UserWarning]) == 4


def test_a_command_without_logging_filters_too(begin):
    terminal = begin(filter_unhandled)
    filter_unhandled()
    for _ in range(2):
        say("bitsandbytes.backends.cpu.ops", logging.WARNING, "Failed to load CPU gemm_4bit_forward")
        say("transformers.x.unhandled", logging.ERROR, "broken")
        say("my_file", logging.WARNING, "mine")
    assert len(logging.lastResort.filters) == 1
    assert "gemm_4bit" not in terminal.getvalue()
    assert terminal.getvalue().count("mine") == 2


def test_the_processes_of_an_engine_are_told_the_same():
    """vLLM reads these variables when it is imported: a filter by our class, on stderr. A user who asks for a level
    gets vLLM's own lines, all of them."""
    assert "VLLM_LOGGING_CONFIG_PATH" not in logging_variables({"VLLM_LOGGING_LEVEL": "DEBUG"})
    settings = json.loads(Path(logging_variables({})["VLLM_LOGGING_CONFIG_PATH"]).read_text())
    logger = logging.getLogger("vllm")
    before = list(logger.handlers), logger.propagate, logger.level
    try:
        logging.config.dictConfig(settings)
        (handler,) = logger.handlers
        assert [type(found) for found in handler.filters] == [ForeignLines]
    finally:
        (logger.handlers[:], logger.propagate, level) = before
        logger.setLevel(level)
