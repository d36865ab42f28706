"""From a command line to a trainer: settings, processes, and the inputs that are loaded before the models."""
