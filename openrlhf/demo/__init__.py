"""A task, a tokenizer and a model small enough to train with RL on a laptop in minutes, made from nothing."""
