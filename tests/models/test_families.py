"""The contract of a model family: training, rollout, LoRA and checkpoints compute the model of transformers.

Every outcome is the one that docs/models.md shows: right, or refused by the checks of `--dry-run`. An outcome that is
neither is a known fault, of which the test must fail: it is an error when the fault is gone, until the record is made
again.
"""

import functools
import tempfile
from pathlib import Path

import pytest

from tests.models.cells import CELLS, LISTED, TINY, recorded, run_cell
from tests.models.checks import Saved, save_family

#: one family of each kind, of which the fast tests have every cell but the one with two processes
KINDS = (
    "qwen3",  # a dense decoder that every engine has
    "deepseek_v3",  # latent attention, shared experts, a dense first layer
    "qwen3_next",  # linear attention, experts
    "mamba2",  # no attention
    "gpt_oss",  # attention sinks, experts with biases
    "gemma4_text",  # layers of different sizes
)
#: families that people train, of which the fast tests have the training
TODAY = (
    *("apertus", "arcee", "bamba", "bloom", "cohere", "cohere2", "deepseek_v2", "ernie4_5", "exaone4", "falcon_h1"),
    *("gemma2", "gemma3_text", "gemma3n_text", "glm4", "glm4_moe", "gpt2", "gpt_neox", "granite", "granitemoehybrid"),
    *("helium", "jamba"),
    *("lfm2", "llama", "llama4_text", "mamba", "minimax_m2", "ministral3", "mistral", "mixtral", "mpt"),
    *("nemotron", "nemotron_h", "olmo2", "olmo3", "olmoe", "opt", "phi3", "phimoe", "qwen2", "qwen2-window"),
    *("qwen3_5_text", "qwen3_moe", "roberta", "seed_oss", "smollm3", "stablelm", "starcoder2", "xglm", "zamba2"),
)


def is_fast(family: str, cell: str) -> bool:
    return (family in KINDS and cell != "ranks") or (family in TODAY and cell == "sft")


def cases() -> list:
    """(family, cell); those with a known fault are expected to fail."""
    result = []
    for family in TINY:
        for cell in (*CELLS, *LISTED):
            outcome = recorded(family, cell)
            marks = [] if is_fast(family, cell) else [pytest.mark.slow]
            if not outcome.is_settled:
                marks.append(pytest.mark.xfail(reason=f"{outcome.result}: {outcome.message}", strict=True))
            result.append(pytest.param(family, cell, id=f"{family}-{cell}", marks=marks))
    return result


@functools.lru_cache(maxsize=1)
def saved(family: str) -> tuple[Saved, tempfile.TemporaryDirectory]:
    """The tiny model of a family, and its folder, which exists as long as this object."""
    folder = tempfile.TemporaryDirectory()
    return save_family(family, Path(folder.name)), folder


@pytest.mark.parametrize(("family", "cell"), cases())
def test_a_cell(family, cell):
    outcome = run_cell(cell, saved(family)[0])
    assert outcome.is_settled, f"{outcome.result}: {outcome.message}"
    assert outcome.result == recorded(family, cell).result, f"run python scripts/model_table.py {family}"
