"""Rows with the same prompt compute its tokens once; tests/models compares outputs and gradients with rows alone."""

import random

import pytest
import torch

from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.engines.micro_batch import plan_micro_batches
from verl.modeling.packing import build_input
from verl.modeling.shared_prefix import MOST_KEYS, first_with_prompt, plan_shared_prefixes, shared_prefix_layout
from verl.protocol import DataProto

VOCABULARY = 32


def batch(seed: int = 0, empty: bool = True) -> DataProto:
    """Rows of four prompts in mixed order, two prompts with a common start; some responses are empty."""
    generator = random.Random(seed)
    prompts = [[3, 4, 5], [3, 4, 5, 6, 7], [9], [4, 5]]
    chosen = generator.choices(prompts, k=11)
    least = 0 if empty else 1
    answers = [[generator.randrange(1, VOCABULARY) for _ in range(generator.randint(least, 6))] for _ in chosen]
    answers[-1] = [1, 2]
    columns = build_sequences(chosen, answers, pad_token_id=0)
    noise = torch.Generator().manual_seed(seed)
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        drawn = torch.randn(columns["responses"].shape, generator=noise)
        columns[name] = drawn if name == "advantages" else drawn * 0.1 - 3.4
    return DataProto.from_dict(columns)


def test_first_row_with_each_prompt():
    columns = build_sequences([[1, 2], [2], [1, 2], [0, 2], [2]], [[5], [1], [6, 6], [5], [2]], pad_token_id=0)
    width = columns["responses"].shape[1]
    # a token with the id of the padding is not padding
    assert first_with_prompt(columns["attention_mask"], columns["input_ids"], width) == [0, 1, 0, 3, 1]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_finds_its_tokens(seed):
    columns = batch(seed).batch
    attention, width = columns["attention_mask"].bool(), columns["responses"].shape[1]
    first = first_with_prompt(attention, columns["input_ids"], width)
    layout = shared_prefix_layout(attention, width, first)
    prompts, answers = attention[:, :-width].sum(1).tolist(), attention[:, -width:].sum(1).tolist()
    ids = columns["input_ids"].flatten()[layout.kept]
    computed = [i for i in range(len(first)) if answers[i] or first[i] == i]
    assert sorted(layout.rows.tolist()) == computed
    assert layout.queries.tolist() == [answers[i] + prompts[i] * (first[i] == i) for i in layout.rows.tolist()]
    assert len(ids) == sum(layout.queries)
    expected = torch.cat([columns["input_ids"][i][attention[i]] for i in layout.rows])
    assert torch.equal(ids[layout.source], expected)
    assert torch.equal(layout.source[layout.representative], torch.arange(len(ids)))
    uses = [layout.uses[a:b].tolist() for a, b in zip(layout.offsets[:-1], layout.offsets[1:])]
    assert uses == [(layout.source == i).nonzero()[:, 0].tolist() for i in range(len(ids))]


def test_a_prompt_counts_once_in_a_micro_batch():
    def plan(prompts: list[list[int]], answers: list[int], budget: int) -> list[list[int]]:
        lengths = [len(prompt) + answer for prompt, answer in zip(prompts, answers)]
        columns = build_sequences(prompts, [[7] * answer for answer in answers], pad_token_id=0)
        return plan_shared_prefixes(columns, lengths, budget)

    rows = [[1] * 8] * 3 + [[2] * 10] + [[1] * 8], [2, 2, 1, 2, 2]
    # row 0 and the others of its prompt: 10 + 2 + 1 + 2 = 15; with row 3 it would be 27
    assert plan(*rows, 16) == [[0, 1, 2, 4], [3]]
    assert plan(*rows, 27) == [[0, 1, 2, 3, 4]]
    # a prompt counts again in every micro-batch
    assert plan(*rows, 12) == [[0, 1], [2, 4], [3]]
    # keys take memory, too
    assert [len(rows) for rows in plan([[1] * 100] * 40, [1] * 40, 140)] == [MOST_KEYS * 140 // 101] * 8


def test_rows_with_different_prompts_are_split_as_without_sharing():
    columns = build_sequences([[i] for i in range(1, 6)], [[7] * n for n in (3, 5, 2, 4, 3)], pad_token_id=0)
    lengths = columns["attention_mask"].sum(1).tolist()
    micro = MicroBatching(tokens=7)
    assert plan_micro_batches(lengths, micro, columns) == plan_micro_batches(lengths, micro)
    alone, shared = (build_input(columns, True, share) for share in (False, True))
    assert shared.packing.keys is None
    assert torch.equal(alone.states, shared.states) and torch.equal(alone.input_ids, shared.input_ids)
