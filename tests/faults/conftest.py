"""Keeps what became of every try in `RESULTS.md`."""

from pathlib import Path

import pytest
from fault_results import Results

RESULTS = Path(__file__).with_name("RESULTS.md")
_results = Results()


@pytest.fixture
def results() -> Results:
    return _results


def pytest_sessionfinish():
    _results.write(RESULTS)
