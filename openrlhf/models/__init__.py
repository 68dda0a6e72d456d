"""Models: loading, packed forwards, heads."""

import os

import torch

if not torch.cuda.is_available():
    # Transformers imports DeepSpeed where it is installed, which otherwise says on stdout that it found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
