"""Keeps what became of every try in `RESULTS.md`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_results import Results

_results = Results()


@pytest.fixture
def results() -> Iterator[Results]:
    """Written after every test: a session that is broken off has said what it knows."""
    yield _results
    _results.write(Path(__file__).with_name("RESULTS.md"))
