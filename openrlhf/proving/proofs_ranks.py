"""Proofs over processes: two gloo ranks with the run's own backend compute the gradient of one."""
