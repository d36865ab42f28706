"""Built-in rules. Each module registers its reward functions when it is imported (see `verl.rewards.resolve`)."""
