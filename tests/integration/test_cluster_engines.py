"""The engines of a cluster, as one engine: they fulfil the contract together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engine_contract import EngineContract, Subject
from safetensors.torch import load_file

pytestmark = pytest.mark.slow


class TestContract(EngineContract):
    @pytest.fixture
    def subject(self, inputs, cluster) -> Iterator[Subject]:
        """Whatever ran before has pushed its own weights; none of the engines may be lost."""
        weights = sorted(load_file(inputs.model / "model.safetensors").items())
        subject = Subject(cluster.engines, weights, [3, 4, 5, 6], max_tokens=26, quiet=0.3)
        cluster.engines.take_replaced()
        asyncio.run(subject.push(weights))
        yield subject
        cluster.engines.wait_for_replacements()
        assert cluster.engines.take_replaced() == 0
