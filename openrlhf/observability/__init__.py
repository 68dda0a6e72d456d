"""The view of a run for people: numbers, progress, sampled rollouts, one report page. Only `usage` imports torch."""
