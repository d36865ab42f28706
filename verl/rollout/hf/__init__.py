"""`rollout.name=hf`: transformers' `generate`. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {"HFRollout": "verl.rollout.hf.engine", "make_hf": "verl.rollout.hf.factory"}

__all__ = [*_HOME]
__getattr__, __dir__ = lazy_names(__name__, _HOME)
