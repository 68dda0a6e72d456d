"""vLLM as an engine: its asynchronous engine in this process, its workers in their own.

executor.py     where the worker of an engine on a CPU lives
engine.py       VllmEngine: requests in, generations out; pause and resume around a push of weights
settings.py     how an engine is started, and vLLM's arguments for it
sampling.py     our sampling parameters in vLLM's words
texts.py        tokens decoded at the end of a generation, or part by part
"""

import os
from pathlib import Path

# Read when vLLM is imported, here and in its processes. stdout is for what machines read. Who asks vLLM for a level of
# its own gets all of its lines.
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
if not {"VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_CONFIGURE_LOGGING"} & os.environ.keys():
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(Path(__file__).with_name("logging.json"))
