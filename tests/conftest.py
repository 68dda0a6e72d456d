"""Small models and trajectories (`support/small_rl.py`), made once per module that asks for them."""

import signal

import pytest

# Shells start background jobs with SIGINT ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def models():
    from small_rl import make_models

    return make_models()


@pytest.fixture(scope="module")
def groups():
    from small_rl import make_groups

    return make_groups()
