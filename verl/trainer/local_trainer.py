"""LocalPPOTrainer: PPOTrainer on this host, without Ray, in one process or several."""

from verl.trainer.ppo_trainer import PPOTrainer


class LocalPPOTrainer(PPOTrainer):
    """Policy optimization on one host. Logs the seconds of each operator (trainer.log_operators).

    >>> LocalPPOTrainer(config_path="./config.yaml", train_dataset=train_dataset).fit()
    """

    backend = "local"
    logs_operators = True
