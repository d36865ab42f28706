"""Computation of a decoder: packed inputs, attention, fused layers, log-probs. Depends on torch only."""
