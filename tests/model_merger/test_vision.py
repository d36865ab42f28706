"""Checkpoints of vision-language models, trained on two ranks, merge to models with the same outputs for images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.engines.ranks import make_engine, run_on_ranks, train
from tests.engines.test_vision import expected_log_probs, make_batch
from tests.vl_models import FAMILIES, save_vl_model
from verl.config.schema import OptimConfig
from verl.data.processor import copy_processor_files
from verl.engines.base import MicroBatching
from verl.engines.parallel import init_process_group
from verl.model_merger.merge import MergeOptions, compare, merge


def trained_on_ranks(folder: Path, paths: dict[str, str]) -> dict[str, Any]:
    """For `run_on_ranks`: save a checkpoint of each family after an update with images. Returns log-probs after it."""
    init_process_group(torch.device("cpu"))
    found = {}
    for family, path in paths.items():
        engine = make_engine(path, OptimConfig(lr=1e-2), sharded=True)
        batch = make_batch(family, engine.module.config)
        train(engine, batch, MicroBatching(), 1)
        engine.save(folder / family / "actor", ("model",))
        found[family] = engine.infer(batch, ("log_probs",), MicroBatching(), 0.7)["log_probs"]
    return found


@pytest.mark.parametrize(
    "families",
    [pytest.param(("qwen2_5_vl",), id="fast"), pytest.param(FAMILIES, id="every family", marks=pytest.mark.slow)],
)
def test_the_merged_model_has_the_outputs_of_the_trained_one(families, tmp_path):
    paths = {family: save_vl_model(family, tmp_path / "base" / family) for family in families}
    log_probs, _ = run_on_ranks(2, trained_on_ranks, tmp_path, paths)
    for family, path in paths.items():
        actor, merged = tmp_path / family / "actor", tmp_path / "merged" / family
        copy_processor_files(make_engine(path).spec.model, actor / "huggingface")  # as checkpoints of a run have them
        merge(MergeOptions(actor, merged))
        assert compare(actor, merged) == []
        assert (merged / "preprocessor_config.json").is_file()
        model = AutoModelForImageTextToText.from_pretrained(merged)
        batch = make_batch(family, model.config)
        expected = expected_log_probs(str(merged), family, batch)
        known = expected.any(1)
        assert torch.allclose(log_probs[family][known].double(), expected[known], atol=1e-4)
        before = expected_log_probs(path, family, batch)
        assert not torch.allclose(before[known], expected[known], atol=1e-2)
        tower = [name for name, p in model.named_parameters() if "visual." in name or "vision_tower." in name]
        original = AutoModelForImageTextToText.from_pretrained(path).state_dict()
        assert tower and not torch.equal(model.state_dict()[tower[0]], original[tower[0]])
