"""What assembles and launches a run: from a configuration to the parts of a loop, on one machine or a cluster."""
