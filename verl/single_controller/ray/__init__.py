"""Worker groups of Ray actors."""
