"""Keeps what became of every try in `RESULTS.md`; and one cluster, for tests that kill a part of it and leave it whole."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_results import Results
from faulty_runs import Inputs

_results = Results()


@pytest.fixture
def results() -> Iterator[Results]:
    """Written after every test: a session that is broken off has said what it knows."""
    yield _results
    _results.write(Path(__file__).with_name("RESULTS.md"))


@pytest.fixture(scope="session")
def inputs(tmp_path_factory):
    return Inputs.made(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def cluster(inputs, tmp_path_factory):
    """Two engines, which pass the seeds of requests on."""
    import torch
    from shared_cluster import shared_cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        folder = tmp_path_factory.mktemp("cluster")
        with shared_cluster(inputs.config(folder / "run"), folder) as shared:
            yield shared
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def engines(cluster):
    """With replacements as before the first."""
    from openrlhf.cluster.health import ReplacementBudget

    cluster.engines.budget = ReplacementBudget()
    return cluster.engines
