"""What watches a run: bad steps, restarts, interruption, operators that do not end, early stopping, profiles."""
