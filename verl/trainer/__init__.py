"""Trainers: one loop over a flow; who executes it is the only difference between them."""
