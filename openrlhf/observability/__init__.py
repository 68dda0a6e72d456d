"""What people see of a run: numbers, progress, sampled rollouts, one report page. Imports no torch."""
