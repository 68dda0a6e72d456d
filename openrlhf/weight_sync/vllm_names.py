"""What trainer and vLLM's workers must call the same. Imports nothing."""

RPC_BACKEND = "openrlhf_rpc"
"""Our weight-transfer engines' names in vLLM's factories: buckets inside the calls,"""
IPC_BACKEND = "openrlhf_ipc"
"""or left on the device that trainer and worker share, with a handle in the call,"""
GROUP_BACKEND = "openrlhf_group"
"""or sent through a process group of trainer and workers, while the call says what comes."""

WORKER_EXTENSION = "openrlhf.weight_sync.vllm_worker.WorkerExtension"
"""Importing it in a worker process registers the engines there."""
OWNER = "OPENRLHF_ENGINE_OWNER"
"""In the environment of an engine's processes: the process that they belong to."""
