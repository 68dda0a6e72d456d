"""The Hub may be out of reach: ask once and briefly, then do with its cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

PROBE_SECONDS = 5.0


def hub_reachable() -> bool:
    """One short request: `datasets` and `transformers` retry for half a minute before they say so."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # whatever the HTTP client raises: the answer is no
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Cached copies only, without a request."""
    import datasets.config
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before
