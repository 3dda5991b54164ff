"""Rewards: scoring functions by kind, and the process pool that runs them with a time limit. Torch-free."""
