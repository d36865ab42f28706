"""`verl config`: explain, show, diff, convert. `python -m verl.cli.config` is explain."""

from verl.utils.lazy import lazy_names

_HOME = dict.fromkeys(("SCHEMAS", "main", "select"), "verl.cli.config.explain")

__all__ = list(_HOME)

__getattr__, __dir__ = lazy_names(__name__, _HOME)
