"""Small models and trajectories, made once per module that asks for them."""

import pytest
from small_rl import make_groups, make_models


@pytest.fixture(scope="module")
def models():
    return make_models()


@pytest.fixture(scope="module")
def groups():
    return make_groups()
