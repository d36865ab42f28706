"""The factory of `rollout.name=hf`."""

from verl.rollout.hf.engine import make_hf

__all__ = ["make_hf"]
