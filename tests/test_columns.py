"""The column table: every row of it violated once, and every rule of the strict check."""

import functools
import re

import pytest
import torch

from verl import DataFlow, DataProto, DataProtoValidationError, Operator
from verl.columns import COLUMNS, callable_name, check, describe_source, strict_check_enabled

B, P, T = 3, 4, 5
SIZES = {"B": B, "P": P, "T": T, "P+T": P + T}
DTYPE = {"int64": torch.int64, "mask": torch.int64, "float": torch.float32}


def good() -> DataProto:
    """Three rows that keep every rule, with every column of the table.

    Prompts of 4, 2 and 1 tokens padded on the left, responses of 5, 3 and 1 tokens padded on the right; the second
    response has a token of a tool (position 1), which the policy did not sample. Padding is filled with NaN.
    """
    attention = torch.tensor([[1] * 9, [0, 0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]])
    chosen = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 0], [1, 0, 0, 0, 0]])
    positions = torch.tensor([[*range(9)], [0, 0, 0, 1, 2, 3, 4, 0, 0], [0, 0, 0, 0, 1, 0, 0, 0, 0]])
    ids = torch.arange(B * (P + T)).reshape(B, P + T)
    tensors = {
        "prompts": ids[:, :P],
        "responses": ids[:, P:],
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": positions,
        "response_mask": chosen,
        "loss_mask": chosen,
        "reward_baselines": torch.zeros(B),
        "weight_version": torch.zeros(B, dtype=torch.int64),
        "routed_experts": torch.where(attention[..., None, None] > 0, torch.tensor([[3, 0], [1, 2]]), -1).short(),
    }
    candidates = {"candidate_ids": torch.zeros(B, T, 4, dtype=torch.int64)}
    candidates["teacher_candidate_log_probs"] = torch.full((B, T, 4), -2.0)
    floats = {k: torch.full((B, T), float("nan")) for k, c in COLUMNS.items() if (c.dims, c.dtype) == ("B T", "float")}
    for value in floats.values():
        value[chosen == 1] = 0.5
    objects = {k: [f"{k} of row {i}" for i in range(B)] for k, c in COLUMNS.items() if c.dtype == "object"}
    objects["multi_modal_inputs"] = [{"pixel_values": torch.ones(2)}, None, None]
    return DataProto.from_dict(tensors | candidates | floats, objects, {"vocab_size": B * (P + T)})


#: columns of tensors whose shape is fixed by B, P and T
OF_TENSORS = [k for k, c in COLUMNS.items() if c.dtype != "object" and not c.dims.endswith("k")]


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")


def refused(batch: DataProto, message: str) -> None:
    with pytest.raises(DataProtoValidationError, match=message):
        check(batch)


def test_the_good_batch_has_every_column_and_passes(strict):
    assert set(good().columns) == set(COLUMNS)
    check(good())


# ---- shapes and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [k for k in OF_TENSORS if k != "responses"])
def test_a_wrong_width_names_column_expected_and_found(name):
    """One position too many. `responses` itself defines T: it is the others that are wrong then."""
    column = COLUMNS[name]
    expected = [SIZES[d] for d in column.dims.split()]
    found = (*expected[:-1], expected[-1] + 1) if len(expected) > 1 else (B, 1)
    batch = good()
    if name == "prompts":  # defines P: the first wider column is wrong
        batch = batch.select(["prompts", "responses", "input_ids"], [])
        batch.batch["prompts"] = torch.zeros(B, P + 1, dtype=torch.int64)
        return refused(
            batch, r"'input_ids': expected shape \(B=3, P\+T=10\) with P as in 'prompts' .*found shape \(3, 9\)"
        )
    batch.batch[name] = torch.zeros(found, dtype=DTYPE[column.dtype])
    shape = ", ".join(f"{d}={s}" for d, s in zip(column.dims.split(), expected))
    refused(batch, rf"column '{name}': expected shape {re.escape(f'({shape})')}.*, found shape {re.escape(str(found))}")


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_wrong_number_of_dimensions(name):
    batch = good()
    batch.batch[name] = torch.zeros(B, 2, 2, 2, dtype=DTYPE[COLUMNS[name].dtype])
    refused(batch, rf"column '{name}': expected shape \(B=3.*found shape \(3, 2, 2, 2\)")


@pytest.mark.parametrize("name", OF_TENSORS)
def test_a_wrong_dtype(name):
    batch = good()
    wrong, allowed = {
        "int64": (torch.int32, "int64"),
        "float": (torch.bfloat16, "float32 or float64"),
        "mask": (torch.float16, "bool or uint8"),
    }[COLUMNS[name].dtype]
    batch.batch[name] = batch.batch[name].to(wrong)
    refused(batch, rf"column '{name}': expected dtype {allowed}.*, found {str(wrong).removeprefix('torch.')}")


@pytest.mark.parametrize("name", COLUMNS)
def test_a_wrong_kind(name):
    """Objects where a tensor belongs, and the other way round."""
    batch = good().drop(name)
    if COLUMNS[name].dtype == "object":
        batch.batch[name] = torch.zeros(B)
        refused(batch, rf"column '{name}': expected a column of objects, one per row, found a tensor of shape \(3,\)")
    else:
        batch.non_tensor_batch[name] = good().non_tensor_batch["uid"]
        refused(batch, rf"column '{name}': expected a tensor of dims \(B.*found a column of objects")


def test_widths_agree_without_responses():
    batch = DataProto.from_dict({"old_log_probs": torch.zeros(2, 5), "values": torch.zeros(2, 4)})
    refused(batch, r"'values': expected shape \(B=2, T=5\) with T as in 'old_log_probs', found shape \(2, 4\)")


def test_unknown_sizes_and_unknown_columns_are_not_checked():
    check(DataProto.from_dict({"attention_mask": torch.ones(2, 9), "mine": torch.zeros(2, 7, 7).half()}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32])
def test_masks_come_in_many_dtypes(dtype, strict):
    batch = good()
    for name in ("response_mask", "attention_mask"):
        batch.batch[name] = batch.batch[name].to(dtype)
    check(batch)


# ---- contents -------------------------------------------------------------------------------------------------------


def changed(name: str, row: int, position: int | None, value: float) -> DataProto:
    """The good batch with one entry of one column changed."""
    batch = good()
    column = batch.batch[name].clone()
    column[row if position is None else (row, position)] = value
    batch.batch[name] = column
    return batch


#: name -> (column, row, position, value), message
VIOLATIONS = {
    "mask not binary": (("response_mask", 0, 1, 2),
     r"'response_mask': expected 0 or 1 everywhere, found 2 at row 0, position 1"),
    "negative mask": (("attention_mask", 0, 1, -1),
     r"'attention_mask': expected 0 or 1 .* found -1 at row 0, position 1"),
    "hole in a prompt": (("attention_mask", 0, 1, 0),
     r"prompts padded on the left only, found a hole in row 0 after token 0"),
    "hole in a response": (("attention_mask", 1, 5, 0),
     r"responses padded on the right only, found a hole in row 1 at resp"),
    "chosen padding": (("response_mask", 1, 4, 1),
     r"'response_mask': expected 0 where attention_mask is 0, found 1 at row 1"),
    "wrong position": (("position_ids", 1, 3, 7), r"'position_ids': expected 1 at row 1, position 3 .*found 7"),
    "id of the vocabulary's size": (("responses", 2, 4, 27),
     r"'responses': expected token ids from 0 to 26, found 27 at row 2"),
    "negative id": (("prompts", 0, 0, -100),
     r"'prompts': expected token ids from 0 to 26, found -100 at row 0, position 0"),
    "other ids": (("input_ids", 1, 6, 3),
     r"'input_ids': expected prompts followed by responses: 15, found 3 at row 1, pos"),
    "NaN": (("values", 1, 2, float("nan")), r"'values': expected finite values, found nan at row 1, token 2"),
    "infinity": (("advantages", 0, 4, float("inf")),
     r"'advantages': expected finite values, found inf at row 0, token 4"),
    "NaN of a row": (("reward_baselines", 2, None, float("nan")), r"'reward_baselines': .* found nan at row 2$"),
}  # fmt: skip


@pytest.mark.parametrize("name", VIOLATIONS)
def test_strict_check_of_contents(name, monkeypatch):
    entry, message = VIOLATIONS[name]
    batch = changed(*entry)
    monkeypatch.delenv("VERL_STRICT_DATA_CHECK", raising=False)
    check(batch)
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "0")
    check(batch)
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "1")
    refused(batch, message)


@pytest.mark.parametrize("name", [k for k, c in COLUMNS.items() if c.dtype == "float" and c.dims == "B T"])
def test_every_float_column_is_finite_where_it_counts_only(name, strict):
    for row, position in ((1, 1), (1, 3), (2, 4)):  # a tool's token, and padding
        check(changed(name, row, position, float("-inf")))
    refused(changed(name, 2, 0, float("-inf")), f"'{name}': expected finite values, found -inf at row 2, token 0")


def test_without_response_mask_the_attention_mask_says_what_counts(strict):
    batch = changed("values", 1, 1, 0.5).drop("response_mask").select(["values", "attention_mask", "responses"], [])
    check(batch)
    batch.batch["values"][1, 2] = float("nan")
    refused(batch, "'values': expected finite values, found nan at row 1, token 2")
    alone = batch.select(["values"])
    refused(alone, "found nan at row 1, token 2 and 6 more")


def test_more_than_one_is_counted(strict):
    batch = changed("returns", 0, 0, float("nan"))
    batch.batch["returns"][0, 3] = float("nan")
    refused(batch, "found nan at row 0, token 0 and 1 more")


def test_a_row_has_a_token(strict):
    batch = good().select(["attention_mask"], [])
    batch.batch["attention_mask"] = torch.tensor([[1, 1], [0, 0], [0, 1]])
    refused(batch, "'attention_mask': expected at least one token in every row, found row 1 without any")


def test_ids_without_a_known_vocabulary(strict):
    batch = changed("responses", 0, 0, -1).select(["responses"], [], [])
    refused(batch, "'responses': expected token ids of at least 0, found -1 at row 0, position 0")
    check(changed("responses", 0, 0, 10**6).select(["responses"], [], []))


def test_no_rows_and_no_tokens_pass(strict):
    check(good()[[]])
    none = {"prompts": torch.zeros(1, 2).long(), "responses": torch.zeros(1, 0).long()}
    none |= {"attention_mask": torch.ones(1, 2), "response_mask": torch.zeros(1, 0), "values": torch.zeros(1, 0)}
    check(DataProto.from_dict(none))


def test_the_switch_is_not_guessed(monkeypatch):
    for value, enabled in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("VERL_STRICT_DATA_CHECK", value)
        assert strict_check_enabled() is enabled
    monkeypatch.setenv("VERL_STRICT_DATA_CHECK", "yes")
    with pytest.raises(ValueError, match="VERL_STRICT_DATA_CHECK: expected 0 or 1, found 'yes'"):
        strict_check_enabled()


# ---- who wrote it ---------------------------------------------------------------------------------------------------


def reward_fn(batch):
    return {"token_level_scores": torch.zeros(B, T + 1)}


def logged(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        return func(*args, **kwargs)

    return wrapper


@logged
@logged
def decorated_fn(batch):
    return reward_fn(batch)


def configured_fn(batch, scale):
    return reward_fn(batch)


class Scorer:
    def __init__(self, unused=None):
        pass

    def __call__(self, batch):
        return reward_fn(batch)

    @logged
    def method(self, batch):
        return reward_fn(batch)

    @staticmethod
    def static(batch):
        return reward_fn(batch)

    @classmethod
    def of_class(cls, batch):
        return reward_fn(batch)


def line_of(definition: str) -> int:
    """The line of this file on which a text stands."""
    with open(__file__) as file:
        return 1 + next(i for i, line in enumerate(file) if line.startswith(definition))


WRITERS = {
    "function": (reward_fn, "reward_fn", "def reward_fn"),
    "lambda": (lambda batch: reward_fn(batch), "<lambda>", '    "lambda": ('),
    "partial": (functools.partial(configured_fn, scale=2), "configured_fn", "def configured_fn"),
    "partials": (functools.partial(functools.partial(configured_fn, scale=2)), "configured_fn", "def configured_fn"),
    "decorated": (decorated_fn, "decorated_fn", "@logged"),
    "bound method": (Scorer().method, "method", "    @logged"),
    "static method": (Scorer.static, "static", "    @staticmethod"),
    "class method": (Scorer.of_class, "of_class", "    @classmethod"),
    "callable object": (Scorer(), "Scorer", "    def __call__"),
    "partial of a callable object": (functools.partial(Scorer()), "Scorer", "    def __call__"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_the_error_names_the_function_that_wrote_the_batch(kind):
    func, name, definition = WRITERS[kind]
    flow = DataFlow([Operator("reward", func, writes="token_level_scores")]).compile()
    with pytest.raises(DataProtoValidationError) as caught:
        flow.run({"responses": torch.zeros(B, T, dtype=torch.int64)})
    first, second = str(caught.value).split("\n")
    assert first == (
        "operator 'reward': column 'token_level_scores': expected shape (B=3, T=5) with T as in 'responses', "
        "found shape (3, 6)"
    )
    assert second == f"  Source: {name}() at line {line_of(definition)} in test_columns.py"


def test_sources_without_python_code():
    assert describe_source(len) == "\n  Source: len()"
    assert describe_source(dict) == "\n  Source: dict()"
    assert describe_source(Scorer) == f"\n  Source: Scorer() at line {line_of('    def __init__')} in test_columns.py"
    assert callable_name(Scorer) == "Scorer" and callable_name(functools.partial(len)) == "len"


def test_strict_contents_are_blamed_on_the_writer_too(strict):
    def adv(batch):
        return {"advantages": torch.full((B, T), float("nan")), "returns": torch.zeros(B, T)}

    flow = DataFlow([Operator("adv", adv, writes=("advantages", "returns"))]).compile()
    with pytest.raises(
        DataProtoValidationError, match=r"(?s)operator 'adv': column 'advantages'.*nan.*Source: adv\(\)"
    ):
        flow.run(good().drop(["advantages", "returns"]))


def test_experts_that_no_router_can_choose(strict):
    def refuses(routes: torch.Tensor, message: str) -> None:
        batch = good()
        batch.batch["routed_experts"] = routes
        refused(batch, message)

    routes = good().batch["routed_experts"]
    refuses(routes[:, 1:], r"'routed_experts': expected shape \(B=3, P\+T=9, layers, k\)")
    refuses(routes.long(), "expected dtype int16, found int64")
    for at, values, message in (
        ((1, 3), [[2, 2]], r"expected different experts.*found \[\[2, 2\]\] at row 1, position 3"),
        ((0, 0), [[-1, 2]], "expected different experts, or -1 only"),
        ((2, 1), [[0, 1]], "-1 where attention_mask is 0, found experts at row 2, position 1"),
    ):
        wrong = routes[:, :, :1].clone()
        wrong[at] = torch.tensor(values, dtype=torch.int16)
        refuses(wrong, message)
