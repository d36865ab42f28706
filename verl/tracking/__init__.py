"""Experiment tracking, the console display of a run, and learning curves."""

from verl.tracking.tracking import TRACKER_REGISTRY, Tracking, check_trackers

__all__ = ["TRACKER_REGISTRY", "Tracking", "check_trackers"]
