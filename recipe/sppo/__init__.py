"""SPPO: self-play preference optimization, an estimator and a policy loss of this name."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.sppo.main_sppo": "SPPOTrainer"})
