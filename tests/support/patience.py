"""Limits of seconds that hold on a machine which has other things to do as well."""

import os


def patience(seconds: float) -> float:
    """So long on a machine of our own; more in proportion where more processes want to run than there are cores."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
