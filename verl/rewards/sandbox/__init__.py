"""Reward functions and generated programs in separate, limited processes."""
