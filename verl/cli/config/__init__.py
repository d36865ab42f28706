"""`verl config`: explain, show, diff, convert. `python -m verl.cli.config` is explain."""

from verl.utils.lazy import lazy_names

_HOME = {"verl.cli.config.show": "SCHEMAS main select"}

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOME)
