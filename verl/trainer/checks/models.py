"""The check of the models of a run before they are built."""

from verl.config import schema
from verl.engines import loading
from verl.trainer.checks.model_config import readable_config


def check_model(model: schema.ModelConfig, kind: str) -> None:
    """The config of a model can be read, accepts its overrides, and fits its use (`verl.engines.loading.check_model`).

    Raises:
        ValueError: it does not.
    """
    readable_config(model.path, model.override_config, model.trust_remote_code)
    loading.check_model(model, kind)
