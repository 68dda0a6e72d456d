"""Runs: from a configuration to the parts of a loop, on one machine or a cluster, until the run has ended."""
