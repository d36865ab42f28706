"""Trainers: one loop over a flow, on any cluster."""
