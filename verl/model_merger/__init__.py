"""From the checkpoint of a training run to a HuggingFace model: `python -m verl.model_merger merge --help`."""
