"""Offline evaluation: generate responses to the prompts of a file, score them, and report the results."""
