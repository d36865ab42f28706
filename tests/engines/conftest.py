"""A model that tests of engines share."""

import pytest

from tests.engines.ranks import qwen2, save_model


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> str:
    """A random model with the architecture of Qwen2; not to be changed."""
    return save_model(qwen2(), tmp_path_factory.mktemp("model"))
