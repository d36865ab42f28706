"""Asynchronous training: generation beside training."""
