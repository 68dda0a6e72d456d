"""reasoning-gym: procedural tasks with verifiers."""
