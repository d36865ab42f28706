"""Real tokenizers and real files for the tests of `verl.data`."""

import copy
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.trainer.conftest import make_tiny, run_settings
from tests.vl_models import save_vl_model
from verl.config.schema import ModelConfig
from verl.data.processor import load_processor
from verl.data.tokenization import load_tokenizer
from verl.registry import import_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny():
    """The module examples/quickstart/tiny_model.py."""
    return import_module(str(ROOT / "examples" / "quickstart" / "tiny_model.py"))


@pytest.fixture(scope="session")
def tasks():
    """The module examples/quickstart/tasks.py."""
    return import_module(str(ROOT / "examples" / "quickstart" / "tasks.py"))


@pytest.fixture
def char_tokenizer(tiny):
    """One token per character of 28, no chat template."""
    return tiny.char_tokenizer()


@pytest.fixture(scope="session")
def trained_bpe(tiny):
    return tiny.bpe_tokenizer()


@pytest.fixture
def chat_tokenizer(trained_bpe):
    """Byte-level BPE with a ChatML template; a copy, so that a test may change it."""
    return copy.deepcopy(trained_bpe)


@pytest.fixture
def write(tmp_path):
    """write("a.jsonl", rows) -> the path of a file with these rows."""

    def write(name: str, rows: list) -> str:
        path = tmp_path / name
        if name.endswith(".parquet"):
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif name.endswith(".json"):
            path.write_text(json.dumps(rows))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def written(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, kind, **settings)
    return out.getvalue()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """family -> (tokenizer, processor), loaded from the files of a model as a run does."""
    loaded = {}

    def load(family="qwen2_vl"):
        if family not in loaded:
            folder = save_vl_model(family, tmp_path_factory.mktemp("models") / family, weights=False)
            model = ModelConfig(path=folder)
            loaded[family] = (tokenizer := load_tokenizer(model)), load_processor(model, tokenizer)
        return loaded[family]

    return load


@pytest.fixture(scope="session")
def gsm8k_folder():
    folder = ROOT.parent / "shared" / "data" / "gsm8k"
    if not folder.is_dir():
        pytest.skip("no local copy of GSM8K")
    return folder


@pytest.fixture
def tiny_run(tmp_path):
    """The overrides of a run of 4 prompts x 2 responses, and its folder."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    return run_settings(make_tiny(folder), tmp_path / "run"), tmp_path / "run"
