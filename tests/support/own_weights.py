"""An engine with weights of its own, in this process: a push has to bring them, and may bring them wrongly."""

import contextlib
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf.backends.base import ModuleWeights
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.runs.engines import EngineKind, LocalEngine, require_nothing
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
from openrlhf.weight_sync.transports import RpcSender


class OwnWeightsEngine(EmbeddedEngine):
    """Reads pushed weights as a model's files; with `stale_head` it keeps its first head, with `swaps` it exchanges the
    gate and the up projection of experts from the second push on."""

    def __init__(self, path, tokenizer, *, stale_head: bool = False, swaps: bool = False, **settings) -> None:
        self.path, self.stale_head, self.swaps = path, stale_head, swaps
        super().__init__(self._read(path), tokenizer, **settings)
        self._received: dict[str, torch.Tensor] = {}
        self._pushes = 0
        self._head: torch.Tensor | None = None

    @staticmethod
    def _read(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def needs_base(self) -> bool:
        return True

    async def pause(self) -> None:
        self._received = {}
        await super().pause()

    async def load_weights(self, blocks, *, adapter=None) -> None:
        assert adapter is None
        self._received |= {name: tensor.clone() for block in blocks for name, tensor in block.tensors()}

    async def resume(self, version: int) -> None:
        if self._received:
            self._take(self._received)
            self._received = {}
        await super().resume(version)

    def _take(self, named) -> None:
        self._pushes += 1
        if self.swaps and self._pushes > 1:
            named = {_swapped(name): tensor for name, tensor in named.items()}
        with tempfile.TemporaryDirectory() as folder:
            AutoConfig.from_pretrained(self.path).save_pretrained(folder)
            save_file(named, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            read = self._read(folder)
        head = self.model.get_output_embeddings()
        with torch.no_grad():
            own = dict(self.model.named_parameters())
            for name, new in read.named_parameters():
                own[name].copy_(new)
            if self.stale_head:
                if self._head is None:
                    self._head = head.weight.detach().clone()
                head.weight = torch.nn.Parameter(self._head, requires_grad=False)


def _swapped(name: str) -> str:
    if ".experts." not in name:
        return name
    return name.replace("gate_proj", "?").replace("up_proj", "gate_proj").replace("?", "up_proj")


def own_weights(**faults) -> EngineKind:
    """For `runs.engines.ENGINES`."""

    @contextlib.contextmanager
    def opened(config, load, tokenizer, device, loop):
        models = load(lambda: None)
        engine = OwnWeightsEngine(
            config.actor.model_name_or_path, tokenizer, max_model_len=config.data.max_len, seed=0, **faults
        )
        weights = PolicyWeights(models.policy, ModuleWeights(models.policy))
        yield LocalEngine(engine, models, EngineWeightSync(engine, weights, RpcSender(), loop))

    return EngineKind(require_nothing, opened, None, lambda: True)
