"""Worlds: environments of existing packages, trainable with a line, each in a process and a Python of its own."""
