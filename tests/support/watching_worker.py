"""A worker of vLLM that says what it was given: which tensors its tower has read, what its experts hold."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf.models.image_processor import digest_of
from openrlhf.rollout.vllm.worker import WorkerExtension

NAME = f"{__name__}.WatchingExtension"


class WatchingExtension(WorkerExtension):
    _seen: list[dict[str, torch.Tensor]]

    def watch_images(self) -> None:
        """From here on; what was seen before is forgotten."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        if "_seen" not in vars(self):
            embed = model.embed_multimodal

            def watched(**inputs: Any) -> Any:
                self._seen.append({name: t.clone() for name, t in inputs.items() if isinstance(t, torch.Tensor)})
                return embed(**inputs)

            model.embed_multimodal = watched
        self._seen = []

    def digest_of_images(self) -> tuple[int, str]:
        """How many times the tower has read something, and the digest of all that, in its order."""
        names = self._seen[0] if self._seen else ()
        joined = {name: torch.cat([inputs[name] for inputs in self._seen]) for name in names}
        return len(self._seen), digest_of(joined, ())

    def sums_of_experts(self) -> dict[str, dict[str, list[float]]]:
        """By the name of a block of experts with room for an adapter: the sum of each of its tensors; and of the same
        when its router is not called with an adapter."""
        found = {}
        for name, layer in self.model_runner.lora_manager._adapter_manager.modules.items():  # type: ignore[attr-defined]
            if name.endswith(".experts"):
                experts, router = layer.base_layer.routed_experts, layer.base_layer.gate
                tensors = {"w13": [experts.w13_weight], "w2": [experts.w2_weight]}
                tensors |= {"w13_a": layer.w13_lora_a_stacked, "w13_b": layer.w13_lora_b_stacked}
                tensors |= {"w2_a": layer.w2_lora_a_stacked, "w2_b": layer.w2_lora_b_stacked}
                tensors |= {"router_b": getattr(router, "lora_b_stacked", ())}
                found[name] = {what: [t.double().sum().item() for t in some] for what, some in tensors.items()}
        return found
