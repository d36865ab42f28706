"""The native rollout engine: generates with the parameters of the training model."""
