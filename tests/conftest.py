"""Small models and trajectories (`support/small_rl.py`), made once per module that asks for them."""

import signal

import hypothesis
import pytest

# How long an example takes says more about what else the machine does than about the code.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

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
