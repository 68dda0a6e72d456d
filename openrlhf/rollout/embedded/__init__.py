"""The engine that lives in the training process: continuous batching over the policy's own weights.

engine.py     EmbeddedEngine: requests in, generations out; admits waiting requests, finishes running ones
batch.py      the running requests as arrays, one row each; a generation in parts, for streams
decoder.py    one packed forward per step over the store, checked against the model at construction
kv_store.py   keys and values of the running rows, and of finished requests for prompts that begin like them
images.py     forwards of prompts with images, and the features of images that are kept
fallback.py   one row at a time with the model's own cache, for models that no attention plan can express
routes.py     the experts that a mixture's routers choose, read along with a forward
sampler.py    logits → tokens, with randomness per request
"""

from openrlhf.rollout.embedded.engine import EmbeddedEngine, EngineStats

__all__ = ["EmbeddedEngine", "EngineStats"]
