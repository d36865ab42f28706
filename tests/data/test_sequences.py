"""Padding of token id lists: figures by hand, and invariances."""

import pytest
import torch

from verl.data.sequences import build_sequences, concat_sequences, position_ids_of
from verl.protocol import DataProto


def test_two_rows_by_hand():
    out = build_sequences([[5], [6, 7, 8]], [[1, 2], [3]], pad_token_id=0)
    assert out["prompts"].tolist() == [[0, 0, 5], [6, 7, 8]]
    assert out["responses"].tolist() == [[1, 2], [3, 0]]
    assert out["input_ids"].tolist() == [[0, 0, 5, 1, 2], [6, 7, 8, 3, 0]]
    assert out["attention_mask"].tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert out["position_ids"].tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 3]]
    assert out["response_mask"].tolist() == [[1, 1], [1, 0]]
    assert {t.dtype for t in out.values()} == {torch.int64}


def test_a_real_token_equal_to_the_pad_id_is_not_padding():
    out = build_sequences([[0, 4]], [[9, 0]], pad_token_id=0, response_width=3)
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1, 0]]
    assert out["response_mask"].tolist() == [[1, 1, 0]]


def test_response_masks_keep_other_peoples_tokens_out_but_attended():
    out = build_sequences([[1]], [[2, 3, 4]], 0, response_masks=[[1, 0, 1]], response_width=4)
    assert out["response_mask"].tolist() == [[1, 0, 1, 0]]
    assert out["attention_mask"].tolist() == [[1, 1, 1, 1, 0]]


def test_fixed_widths_and_an_empty_response():
    out = build_sequences([[1], [2, 3]], [[], [4]], 7, prompt_width=3, response_width=2)
    assert out["prompts"].tolist() == [[7, 7, 1], [7, 2, 3]]
    assert out["responses"].tolist() == [[7, 7], [4, 7]]
    assert out["response_mask"].tolist() == [[0, 0], [1, 0]]
    assert build_sequences([[1]], [[]], 0)["responses"].shape == (1, 0)


def test_real_tokens_do_not_depend_on_the_widths():
    prompts, responses = [[3, 4], [5]], [[6], [7, 8, 9]]
    narrow = build_sequences(prompts, responses, 0)
    wide = build_sequences(prompts, responses, 0, prompt_width=9, response_width=11)
    for name in ("input_ids", "position_ids"):
        for row in range(2):
            kept = [out[name][row][out["attention_mask"][row].bool()].tolist() for out in (narrow, wide)]
            assert kept[0] == kept[1]
    assert wide["input_ids"][1][wide["attention_mask"][1].bool()].tolist() == [5, 7, 8, 9]


def test_position_ids_of():
    assert position_ids_of(torch.tensor([[0, 1, 1, 0]])).tolist() == [[0, 0, 1, 1]]


def test_rows_of_two_widths_by_hand():
    parts = []
    for prompt, response in (([5], [1, 2]), ([6, 7], [3])):
        tensors = build_sequences([prompt], [response], 9)
        tensors["routed_experts"] = tensors["input_ids"][..., None, None].to(torch.int16)
        parts.append(DataProto(tensors, {}))
    out = concat_sequences(parts, 9)
    assert out.batch["input_ids"].tolist() == [[9, 5, 1, 2], [6, 7, 3, 9]]
    assert out.batch["attention_mask"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]
    assert out.batch["routed_experts"].shape == (2, 4, 1, 1)
    assert out.batch["routed_experts"].flatten().tolist() == [-1, 5, 1, 2, 6, 7, 3, -1]  # no expert at padding


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([], [], 0), "at least one row"),
        (([[1]], [[1], [2]], 0), "1 prompts but 2 responses"),
        (([[1], []], [[1], [2]], 0), "prompt of row 1 has no tokens"),
        (([[1]], [[1, 2]], 0, [[1]]), "row 0 has 2 response tokens but a response mask of 1"),
        (([[1]], [[1, 2]], 0, []), "1 responses but 0 response masks"),
    ],
)
def test_bad_rows_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_sequences(*arguments)


def test_a_row_over_its_width_is_named():
    with pytest.raises(ValueError, match="response of row 1 has 3 tokens, more than the width of 2"):
        build_sequences([[1], [1]], [[1], [1, 2, 3]], 0, response_width=2)
