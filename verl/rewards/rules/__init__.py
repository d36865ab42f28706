"""Rule-based rewards, one file per kind of task."""
