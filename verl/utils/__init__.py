"""What every layer may use: checks of the machine, tracking, checkpoints, random states, balance."""
