"""`train_ppo_ray` on an engine that disagrees with the trainer: `python docs/mismatched_engine.py SIGMA FLAGS…`

The engine samples from softmax(logits + noise), noise normal with deviation SIGMA for every token and vocabulary entry,
and reports the log-probs of that distribution, as an engine with other kernels or lower precision does. Noise on the
reported numbers alone would be no mismatch: the samples would still be the trainer's own. Evaluation, which samples at
another temperature than training, meets no noise.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from openrlhf.cli.train_ppo_ray import main
from openrlhf.rollout.embedded import engine, sampler

TRAINING_TEMPERATURE = 1.0
ROWS = 4096


class NoisySampler:
    """`sampler.sample` behind noise. The noise of a row is a function of its uniform: the same in every run."""

    def __init__(self, sigma: float) -> None:
        self._sigma = sigma
        self._table: Tensor | None = None

    def __call__(self, logits: Tensor, *, uniform: np.ndarray, temperature: np.ndarray, **rest) -> sampler.Sampled:
        if self._table is None:
            self._table = torch.randn(ROWS, logits.shape[-1], generator=torch.Generator().manual_seed(0))
        # Low bits of the uniform: its high bits choose the token, and must know nothing of the noise.
        rows = torch.from_numpy((uniform * 2**36).astype(np.int64) % ROWS)
        noisy = torch.from_numpy(temperature == TRAINING_TEMPERATURE)
        logits = logits + self._sigma * noisy[:, None] * self._table[rows]
        return sampler.sample(logits, uniform=uniform, temperature=temperature, **rest)


if __name__ == "__main__":
    engine.sample = NoisySampler(float(sys.argv[1]))
    raise SystemExit(main(sys.argv[2:]))
