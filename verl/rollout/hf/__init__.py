"""`rollout.name=hf`: transformers' `generate`. Names are loaded at first use."""

from verl.utils.lazy import lazy_names

_HOME = {
    "verl.rollout.hf.engine": "HFRollout",
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
