"""Memory of a teacher's top k at a large vocabulary, and of the policy's log-probs of them.

`python -m bench.top_logprobs`. Each is measured in a process of its own: the most memory that it has had, beyond what
it had before.
"""

from __future__ import annotations

import resource
import subprocess
import sys

TOKENS, HIDDEN, VOCABULARY, K = 2048, 64, 152_064, 64


def measure(what: str) -> float:
    """MiB."""
    import torch

    from openrlhf.models.top_logprobs import chosen_logprobs, top_logprobs

    generator = torch.Generator().manual_seed(0)
    hidden_AD = torch.randn(TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight_VD = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    weight_VD.grad, hidden_AD.grad = torch.zeros_like(weight_VD), torch.zeros_like(hidden_AD)
    ids_AK = torch.randint(VOCABULARY // K, (TOKENS, K), generator=generator) + torch.arange(K) * (VOCABULARY // K)
    (hidden_AD[:64].detach() @ weight_VD[:512].detach().t()).sum()  # what the first product of a process allocates
    before = _peak()
    if what == "top k":
        top_logprobs(hidden_AD, weight_VD, K)
    else:
        found = chosen_logprobs(hidden_AD, weight_VD, ids_AK)
        assert found.rest_A is not None
        (found.logprobs_AK.sum() + found.rest_A.sum()).backward()
    return _peak() - before


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    if len(sys.argv) > 1:
        print(measure(sys.argv[1]))
        return 0
    print(f"{TOKENS:,} tokens, hidden size {HIDDEN}, V = {VOCABULARY:,}, k = {K}; whole logits: ", end="")
    print(f"{TOKENS * VOCABULARY * 4 / 2**20:,.0f} MiB")
    for what in ("top k", "chosen, forward and backward"):
        said = subprocess.run(
            [sys.executable, "-m", "bench.top_logprobs", what], capture_output=True, text=True, check=True
        )
        print(f"{what}: {float(said.stdout):,.0f} MiB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
