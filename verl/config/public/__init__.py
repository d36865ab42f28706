"""Keys, scripts and configurations of public verl and TRL: aliases, unsupported keys, conversion."""
