"""What several folders of tests ask for, made once per module: see `support/`."""

import signal

import hypothesis
import pytest

# How long an example takes says more about what else the machine does than about the code.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Shells start background jobs with SIGINT ignored, and every process that a test starts would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM)


@pytest.fixture(autouse=True)
def handlers_of_signals():
    """A test leaves none behind: a run that was interrupted ends its process at the next signal, whose ever it is."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:  # None: set by C code
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def models():
    from small_rl import make_models

    return make_models()


@pytest.fixture(scope="module")
def groups():
    from small_rl import make_groups

    return make_groups()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """What the runs of `support/killed_runs.py` read."""
    from killed_runs import make_inputs

    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def straight(files, tmp_path_factory):
    """A run that nothing happened to."""
    from killed_runs import Sft

    run = Sft(files, tmp_path_factory.mktemp("straight"))
    run.run()
    return run
