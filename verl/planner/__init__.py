"""Planner: memory and time of a training step before anything is loaded, and the best placement of the roles."""
