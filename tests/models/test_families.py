"""The contract of a model family: training, rollout, LoRA and checkpoints compute the model of transformers.

Every outcome is the one that docs/models.md shows: right, or refused by the checks of `--dry-run`. An outcome that is
neither is a known fault: its test must fail, and passes as soon as the fault is fixed and the record is made again.
"""

import re

import pytest

from tests.models.cells import CELLS, TINY, recorded, run_cells

#: one family of each kind, for which the fast tests have every cell
KINDS = (
    "qwen3",  # a dense decoder that every engine has
    "deepseek_v3",  # latent attention, shared experts, a dense first layer
    "qwen3_next",  # linear attention, experts
    "mamba2",  # no attention
    "gpt_oss",  # attention sinks, experts with biases
    "gemma4_text",  # layers of different sizes
    "granite",  # scaled logits
    "bloom",  # attention of its own
)
#: what a refusal names: a setting with its value, or what to do
_FIX = re.compile(r"\w=\S|\b(use|set|remove|add|choose|exclude)\b", re.IGNORECASE)


def check_outcome(family: str, cell: str) -> None:
    expected, outcome = recorded(family, cell), run_cells(family, [cell])[cell]
    assert outcome.is_settled, f"{family}, {cell}: {outcome.result}: {outcome.message}"
    assert outcome.result == expected.result, f"run python scripts/model_table.py {family}: the record differs"
    if outcome.result == "refused":
        assert _FIX.search(outcome.message), f"a refusal that names no way out: {outcome.message}"


def cases(cells, families=TINY) -> list:
    """(family, cell), with faults that are known as expected failures."""
    result = []
    for family in families:
        for cell in cells:
            outcome = recorded(family, cell)
            fault = pytest.mark.xfail(reason=f"{outcome.result}: {outcome.message}", strict=True)
            slow = [] if cell == "sft" or (family in KINDS and cell != "ranks") else [pytest.mark.slow]
            marks = slow if outcome.is_settled else [*slow, fault]
            result.append(pytest.param(family, cell, id=f"{family}-{cell}", marks=marks))
    return result


@pytest.mark.parametrize(("family", "cell"), cases(CELLS))
def test_a_cell(family, cell):
    check_outcome(family, cell)
