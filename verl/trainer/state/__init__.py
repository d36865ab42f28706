"""What a run saves and restores, and when it stops."""
