"""Training backends: they hold the weights, gradients and optimizer state of models, in one process or several.

Adding a backend is a module with a class `Distribution` (see `base.Distribution`) and an entry in `BACKENDS`: the
command line reads its choices there, which is why this file imports no torch.
"""

BACKENDS = {"torch": "openrlhf.backends.torch", "deepspeed": "openrlhf.backends.deepspeed"}
"""Modules by the names that --train.backend takes. `auto` is the first that can do what a run asks for."""
