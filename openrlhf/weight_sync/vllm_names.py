"""What trainer and vLLM's workers must call the same. Imports nothing."""

RPC_BACKEND = "openrlhf_rpc"
"""Our weight-transfer engine's name in vLLM's factories."""

WORKER_EXTENSION = "openrlhf.weight_sync.vllm_worker.WorkerExtension"
"""Importing it in a worker process registers the engine there."""
