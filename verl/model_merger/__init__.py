"""Convert training checkpoints to HuggingFace models: `python -m verl.model_merger merge --help`."""
