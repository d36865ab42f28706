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

#: one family of each kind, of which the fast tests have every cell but that with two processes, and that of `native`:
#: tests/rollout/test_native_generic.py compares these families with transformers too
KINDS = (
    "qwen3",  # a dense decoder that every engine has
    "deepseek_v3",  # latent attention, shared experts, a dense first layer
    "qwen3_next",  # linear attention, experts
    "mamba2",  # no attention
    "gpt_oss",  # attention sinks, experts with biases
    "gemma4_text",  # layers of different sizes
)
#: families of which the fast tests have the training: those that the code names, and one of each way to compute that no
#: other fast family has. The others take the path of one of these: glm4 that of glm4_moe, helium that of llama
TODAY = (
    *("apertus", "bloom", "cohere2", "deepseek_v2", "falcon_h1", "gemma2", "gemma3_text", "gemma3n_text", "glm4_moe"),
    *("gpt2", "granitemoehybrid", "jamba", "lfm2", "llama", "llama4_text", "mamba", "mistral", "mixtral", "nemotron_h"),
    *("olmo3", "olmoe", "opt", "phi3", "qwen2", "qwen2-window", "qwen3_5_text", "qwen3_moe", "roberta", "zamba2"),
)


def is_fast(family: str, cell: str) -> bool:
    return (family in KINDS and cell not in ("ranks", "native")) or (family in TODAY and cell == "sft")


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
