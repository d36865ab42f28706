"""The tiny policy and the settings of tests of trainers."""

from tests.trainer.conftest import forbid_workers, settings, tiny  # noqa: F401
