"""FlowRL: match the distribution of rewards instead of maximizing their mean."""

from verl.utils.lazy import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__, {"verl.recipe.flowrl.main_flowrl": "FlowRLTrainer"})
