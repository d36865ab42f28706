"""What a run prints, logs and records."""
