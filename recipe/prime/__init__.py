"""PRIME: rewards for every token from an implicit process reward model that learns online from outcomes."""

from recipe.prime.trainer import LocalPRIMETrainer

__all__ = ["LocalPRIMETrainer"]
