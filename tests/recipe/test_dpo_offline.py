"""verl dpo on files: the forms of the data, the loss against plain models, that it learns, resume, errors."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.recipe.checks import assert_resumes, assert_same_on_two_processes
from tests.trainer.conftest import make_tiny
from tests.trainer.runs import fit, lines
from verl.algorithms.preference import PreferenceLoss
from verl.recipe.dpo import OfflineDPOTrainer
from verl.recipe.dpo.dataset import PreferenceDataset, collate_preferences
from verl.recipe.dpo.main_dpo import main

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}={{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}a={% endif %}"
)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Rows that prefer the reversed text to the text."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    for name in ("train", "test"):
        rows = lines(folder / f"{name}.jsonl")
        pairs = [{**row, "chosen": row["answer"][::-1] + "a", "rejected": row["answer"]} for row in rows]
        write(folder / f"{name}_pairs.jsonl", pairs)
        sides = [("chosen", True), ("rejected", False)]
        labels = [{"prompt": p["prompt"], "completion": p[side], "label": good} for p in pairs for side, good in sides]
        write(folder / f"{name}_labels.jsonl", labels)
    return folder


@pytest.fixture
def settings(tiny, tmp_path):
    return [
        f"data.train_files={tiny / 'train_pairs.jsonl'}",
        "data.train_batch_size=4",
        f"model.path={tiny / 'model'}",
        "optim.lr=1e-3",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.logger=[jsonl]",
        "trainer.save_at_end=false",
    ]


# ---- forms of the data ----------------------------------------------------------------------------------------------


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CHAT = [user("ab"), assistant("c")]
FORMS = {
    "prompt and texts": {"prompt": "ab", "chosen": "de", "rejected": "f"},
    "conversational": {"prompt": [user("ab")], "chosen": [assistant("de")], "rejected": [assistant("f")]},
    "UltraFeedback": {
        "prompt": "ab",
        "chosen": [user("ab"), assistant("de")],
        "rejected": [user("ab"), assistant("f")],
        "score_chosen": 8.5,
    },
    "implicit prompt": {"chosen": [user("ab"), assistant("de")], "rejected": [user("ab"), assistant("f")]},
    "ShareGPT": {
        "chosen": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "de"}],
        "rejected": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "f"}],
    },
    "HH-RLHF": {
        "chosen": "\n\nHuman: ab\n\nAssistant: de",
        "rejected": "\n\nHuman: ab\n\nAssistant: f",
    },
}


@pytest.fixture
def tokenizer(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def texts(dataset, item=0):
    """(prompt, trained text) of each side of an item, without special tokens."""
    decode = dataset.tokenizer.decode
    samples = dataset[item]["samples"]
    return [(decode(s["prompt_ids"]).replace("<unk>", "?"), decode(s["response_ids"])) for s in samples]


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_pairs_are_the_same_pair(form, tokenizer):
    dataset = PreferenceDataset([FORMS[form]] * 2, tokenizer)
    assert len(dataset) == 2 and dataset[1]["labels"] == [1.0, 0.0] and dataset[1]["index"] == 1
    assert texts(dataset) == [("?=aba=", "de<eos>"), ("?=aba=", "f<eos>")]


def test_texts_without_a_chat_template(tokenizer):
    tokenizer.chat_template = None
    dataset = PreferenceDataset([FORMS["prompt and texts"]], tokenizer)
    assert texts(dataset) == [("ab", "de<eos>"), ("ab", "f<eos>")]


def test_only_what_differs_of_a_long_chat_is_trained(tokenizer):
    rows = [{"chosen": [*CHAT, user("d"), assistant("e")], "rejected": [*CHAT, user("d"), assistant("f")]}]
    assert texts(PreferenceDataset(rows, tokenizer)) == [("?=aba=c<eos>?=da=", end) for end in ("e<eos>", "f<eos>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ab", "completion": "de", "label": True},
        {"prompt": [user("ab")], "completion": [assistant("de")], "label": 1},
        {"completion": [user("ab"), assistant("de")], "label": True},
        {"messages": [user("ab"), assistant("de")], "label": True},
    ],
)
def test_the_forms_of_labels(row, tokenizer):
    dataset = PreferenceDataset([row], tokenizer)
    assert texts(dataset) == [("?=aba=", "de<eos>")] and dataset[0]["labels"] == [1.0]


def test_the_batch_of_pairs_by_hand(tokenizer):
    tokenizer.chat_template = None
    rows = [
        {"prompt": "ab", "chosen": "de", "rejected": "f", "margin": 0.5},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
    ]
    dataset = PreferenceDataset(rows, tokenizer)
    a, b, c, d, e, f = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdef")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    batch = collate_preferences([dataset[0], dataset[1]], pad).batch
    assert batch["prompts"].tolist() == [[a, b], [a, b], [pad, a], [pad, a]]
    assert batch["responses"].tolist() == [[d, e, end], [f, end, pad], [b, end, pad], [c, end, pad]]
    assert batch["response_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 1, 0]]
    assert batch["label"].tolist() == [1, 0, 1, 0] and batch["margin"].tolist() == [0.5, 0.5, 0, 0]
    scores = collate_preferences([dataset[0]], pad, scores=True).batch
    assert scores["prompts"].tolist() == [[a, b, d, e, end], [pad, a, b, f, end]]
    assert scores["responses"].tolist() == [[end], [end]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "chosen": "c", "rejected": "c"}, "row 0 .*chosen and rejected are equal: 'c'"),
        ({"prompt": "ab", "chosen": "c", "rejected": None}, "rejected: expected a response, .* found None"),
        ({"chosen": "ab", "rejected": "cd"}, "no common beginning"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]}, "no common beginning"),
        (
            {"chosen": [*CHAT, user("d"), assistant("e")], "rejected": [*CHAT, user("e")]},
            "first differ in message 2, of user",
        ),
        ({"chosen": [user("a"), assistant("b")], "rejected": "b"}, "one of chosen and rejected is a text"),
        ({"prompt": "a", "chosen": "c", "rejected": "d", "margin": "x"}, "'margin': expected a number, found 'x'"),
        ({"prompt": "a", "completion": "c", "label": 0.5}, "'label': expected 0 or 1, found 0.5"),
        ({"completion": "c", "label": 1}, "no prompt"),
        ({"prompt": "a", "chosen": "c"}, "no column 'rejected'; a preference is a pair"),
        ({"prompt": "a", "response": "c"}, "no column 'label'; a preference is a pair"),
    ],
)
def test_rows_that_are_no_preference(row, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        PreferenceDataset([row], tokenizer)


def test_a_pair_of_which_one_side_is_too_long_is_dropped_whole(tokenizer):
    tokenizer.chat_template = None
    rows = [{"prompt": "ab" * n, "chosen": "c", "rejected": "d"} for n in (1, 5, 2)]
    with pytest.raises(ValueError, match=r"data\.max_length: 2 of 6 samples longer than 8 tokens"):
        PreferenceDataset(rows, tokenizer, {"max_length": 8})
    dataset = PreferenceDataset(rows, tokenizer, {"max_length": 8, "truncation": "right"})
    assert [texts(dataset, i)[0][0] for i in range(len(dataset))] == ["ab", "abab"]


# ---- runs -----------------------------------------------------------------------------------------------------------


def sequences(path, rows):
    model = AutoModelForCausalLM.from_pretrained(path)
    log_probs = []
    for ids, real, mask in zip(rows["input_ids"], rows["attention_mask"].bool(), rows["response_mask"]):
        ids, count = ids[real], int(mask.sum())
        logits = model(ids[None]).logits[0, -count - 1 : -1].double().log_softmax(-1)
        log_probs.append(logits.gather(1, ids[-count:, None]).sum())
    return torch.stack(log_probs).detach()


def test_the_loss_of_a_step_is_that_of_plain_models(tiny, settings):
    """The second step, when the policy is no longer the reference."""
    trainer, reports = fit(
        [*settings, "trainer.save_freq=1", "trainer.total_training_steps=2", "dpo.beta=0.4"], OfflineDPOTrainer
    )
    assert [op.name for op in trainer.pipeline.operators] == ["rows", "ref", "update"]
    folder = trainer.checkpoints.latest().parent / "global_step_1" / "actor" / "huggingface"
    rows = reports[1].batch.tensors
    policy, reference = sequences(folder, rows), sequences(tiny / "model", rows)
    h = 0.4 * ((policy - reference)[0::2] - (policy - reference)[1::2])
    assert reports[1].metrics["train/loss"] == pytest.approx(-h.sigmoid().log().mean().item(), rel=1e-4)
    assert reports[0].metrics["train/loss"] == pytest.approx(math.log(2), rel=1e-5)


def test_validation_is_the_loss_of_plain_models(tiny, settings):
    overrides = [
        *settings,
        f"data.val_files={tiny / 'test_labels.jsonl'}",
        f"data.train_files={tiny / 'train_labels.jsonl'}",
    ]
    overrides += ["dpo.loss=kto", "trainer.total_training_steps=3", "trainer.save_freq=3", "trainer.test_freq=3"]
    trainer, _ = fit(overrides, OfflineDPOTrainer)
    assert [op.name for op in trainer.pipeline.operators] == ["rows", "mismatched", "ref", "update"]
    folder = trainer.checkpoints.latest() / "actor" / "huggingface"
    items = [trainer.val_dataset[i] for i in range(len(trainer.val_dataset))]
    own = collate_preferences(items, 0)
    samples = [item["samples"][0] for item in items]
    swapped = [
        {**item, "samples": [{**sample, **{key: other[key] for key in ("response_ids", "response_mask")}}]}
        for item, sample, other in zip(items, samples, [*samples[1:], samples[0]])
    ]
    mismatched = collate_preferences(swapped, 0)
    ratios = [sequences(folder, each.tensors) - sequences(tiny / "model", each.tensors) for each in (own, mismatched)]
    rows = {
        "log_prob": ratios[0],
        "ref_log_prob": torch.zeros(12),
        "label": own.batch["label"],
        "pair_weight": torch.ones(12),
    }
    expected, _ = PreferenceLoss("kto")(rows, 12, max(ratios[1].mean().item(), 0))
    assert trainer.validate()["val/loss"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.fast("dpo", "kto")
@pytest.mark.parametrize("loss", ["dpo", "simpo", "kto"])
def test_it_learns_the_preference(loss, tiny, settings):
    form = "labels" if loss == "kto" else "pairs"
    files = [
        f"data.{split}_files={tiny / f'{name}_{form}.jsonl'}" for split, name in (("train", "train"), ("val", "test"))
    ]
    overrides = [*settings, *files, f"dpo.loss={loss}", "trainer.total_training_steps=15", "trainer.test_freq=15"]
    trainer, _ = fit(overrides, OfflineDPOTrainer)
    assert ("ref" in trainer.roles) == (loss in ("dpo", "ipo", "kto"))
    metrics = trainer.validate()
    assert metrics["val/rewards/chosen"] > metrics["val/rewards/rejected"]
    if loss != "kto":
        assert metrics["val/rewards/accuracies"] > 0.8


def test_pairs_train_kto_too(settings):
    _, reports = fit([*settings, "dpo.loss=kto", "trainer.total_training_steps=1"], OfflineDPOTrainer)
    assert reports[0].metrics["train/loss"] == pytest.approx(0.5) and reports[0].metrics["dpo/kl"] == 0


def test_lora_is_its_own_reference(settings):
    pytest.importorskip("peft")
    overrides = [*settings, "model.lora_rank=4", "model.lora_alpha=8", "trainer.total_training_steps=2"]
    trainer, reports = fit(overrides, OfflineDPOTrainer)
    assert "ref" not in trainer.roles
    assert reports[0].metrics["train/loss"] == pytest.approx(math.log(2), rel=1e-5) != reports[1].metrics["train/loss"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(settings):
    assert_resumes([*settings, "trainer.total_epochs=1"], OfflineDPOTrainer, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dpo", "kto"])
def test_two_processes_give_the_numbers_of_one(loss, settings):
    run = [*settings, f"dpo.loss={loss}", "optim.lr=1e-5"]
    assert_same_on_two_processes(run, OfflineDPOTrainer, "train/loss", "train/grad_norm")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.chosen_key=chossen", "no column 'chossen'"),
        ("data.messages_key=chosen", r"data.messages_key .*: has no effect on preferences"),
        ("dpo.loss=sigmoid", r"dpo.loss .*known: .*dpo"),
        ("data.train_batch_size=1 dpo.loss=kto", "from the responses of other rows of the batch: use 2 or more"),
        ("dpo={loss: orpo, gamma: 0.5}", "orpo has no setting 'gamma': it has beta"),
        ("data.train_files=LABELS", "responses with a label, but the loss dpo reads pairs: use dpo.loss=kto"),
    ],
)
def test_what_cannot_be_used_is_an_error_before_a_model_is_loaded(override, message, tiny, settings):
    override = override.replace("LABELS", str(tiny / "train_labels.jsonl"))
    overrides = [*settings, *(override.split() if "{" not in override else [override])]
    with pytest.raises(ValueError, match=message):
        OfflineDPOTrainer(overrides=overrides)


def test_the_command_checks_the_loss(settings, capsys):
    assert main([*settings, "dpo.loss=simpoo"], "verl dpo") == 1
    assert "did you mean 'simpo'" in capsys.readouterr().err
    assert main(["--help"], "verl dpo") == 0
    assert "verl dpo --online" in capsys.readouterr().out


CUSTOM = """
import torch
from verl.algorithms.preference import PairTerms, register_preference_loss

@register_preference_loss("unit_slic")
def slic(chosen, rejected, *, beta=0.1):
    return PairTerms(torch.relu(1 - beta * (chosen - rejected)), beta * chosen, beta * rejected)
"""


def test_a_custom_loss(settings, tmp_path):
    (tmp_path / "slic.py").write_text(CUSTOM)
    overrides = [*settings, f"imports=[{tmp_path / 'slic.py'}]", "dpo.loss=unit_slic", "dpo.beta=0.5"]
    trainer, reports = fit([*overrides, "trainer.total_training_steps=1"], OfflineDPOTrainer)
    assert [op.name for op in trainer.pipeline.operators] == ["rows", "update"]
    assert reports[0].metrics["train/grad_norm"] > 0
    with pytest.raises(ValueError, match="no preference loss is called 'unit_slick': did you mean 'unit_slic'"):
        OfflineDPOTrainer(overrides=[*overrides, "dpo.loss=unit_slick"])
