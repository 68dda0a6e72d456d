"""Gymnasium's environments with discrete actions, as text."""
