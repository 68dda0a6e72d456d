"""The engine that lives in the training process: continuous batching over the policy's own weights.

engine.py     EmbeddedEngine: requests in, generations out; who is admitted, who is finished
batch.py      the running requests, as arrays: one row each
decoder.py    one packed forward per step, over the store
kv_store.py   keys and values of the running rows
kept.py       those of finished requests, for prompts that begin like them
fallback.py   a row at a time with the model's own cache, for models a plan cannot express
sampler.py    logits → tokens, with per-request randomness
stopping.py   end-of-sequence ids, stop strings, growing text
streaming.py  a generation in parts
"""

from openrlhf.rollout.embedded.engine import EmbeddedEngine, EngineStats

__all__ = ["EmbeddedEngine", "EngineStats"]
