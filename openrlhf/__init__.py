"""Reinforcement learning for language models: algorithm × execution mode × pipeline, one loop."""
