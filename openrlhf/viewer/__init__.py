"""A local web page of runs: curves, rollouts and their tokens, read from the runs' folders, also while they train."""
