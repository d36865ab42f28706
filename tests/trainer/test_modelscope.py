"""VERL_USE_MODELSCOPE=True: ids of models are downloaded by the package modelscope, here a fake of it."""

import sys

import pytest

from verl.config.schema import ModelConfig
from verl.data.tokenization import load_tokenizer
from verl.modeling import huggingface
from verl.trainer import main_ppo

FAKE = """
calls = []


def snapshot_download(name):
    calls.append(name)
    if name != "org/tiny":
        raise RuntimeError(f"404: {name}")
    return FOLDER
"""


@pytest.fixture
def modelscope(tmp_path, tiny, monkeypatch):
    """The fake package, and the variable set."""
    (tmp_path / "modelscope.py").write_text(f"FOLDER = {str(tiny / 'model')!r}\n{FAKE}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "True")
    huggingface._from_modelscope.cache_clear()
    yield
    huggingface._from_modelscope.cache_clear()
    sys.modules.pop("modelscope", None)


def test_a_run_with_an_id_of_modelscope(modelscope, settings, caplog):
    given = ["actor_rollout_ref.model.path=org/tiny", "algorithm.name=ppo", "trainer.total_training_steps=1"]
    with caplog.at_level("INFO", "verl.trainer"):
        assert main_ppo.main([*settings, *given]) == 0
    assert sys.modules["modelscope"].calls == ["org/tiny"]  # once a process
    assert "model: org/tiny" in caplog.text


def test_a_folder_is_not_asked_for(modelscope, tiny):
    load_tokenizer(ModelConfig(path=str(tiny / "model")))
    assert "modelscope" not in sys.modules


def test_a_model_that_modelscope_does_not_have(modelscope):
    with pytest.raises(ValueError, match="cannot load 'org/none' from ModelScope: RuntimeError: 404: org/none"):
        huggingface.read_config("org/none", {})


def test_without_the_package(modelscope, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(ImportError, match="pip install modelscope, or unset the variable"):
        load_tokenizer(ModelConfig(path="org/tiny"))


def test_without_the_variable_transformers_resolves_the_id(modelscope, monkeypatch):
    monkeypatch.setenv("VERL_USE_MODELSCOPE", "False")
    assert huggingface.model_source("org/tiny") == "org/tiny"
