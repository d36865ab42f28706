"""recipe/dpo with answers from a file: the batch by hand, the loss against transformers, that it learns, bad rows."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer.conftest import make_tiny, run_settings
from tests.trainer.runs import fit
from verl.protocol import DataProto
from verl.recipe.dpo import DPOTrainer
from verl.recipe.dpo.flow import ResponsesOfData
from verl.recipe.dpo.losses import dpo_loss
from verl.recipe.dpo.worker import DPOSection


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Rows that prefer the reversed text to the text."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    pairs = [
        {**row, "chosen": row["answer"][::-1] + "a", "rejected": [{"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]
    write(folder / "pairs.jsonl", pairs)
    return folder


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def settings(tiny, tmp_path):
    plain = [s for s in run_settings(tiny, tmp_path / "run") if not s.startswith("data.train_files")]
    return [*plain, f"data.train_files={tiny / 'pairs.jsonl'}", "dpo.answers=file"]


def test_the_rows_of_a_batch_by_hand(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    batch = DataProto(
        None,
        {
            "prompt_ids": [[5], [5], [6, 7], [6, 7]],
            "sample_index": [0, 1, 0, 1],
            "chosen": ["ab", "ab", "c", "c"],
            "rejected": ["b", "b", *[[{"role": "user", "content": "?"}, {"role": "assistant", "content": "def"}]] * 2],
        },
    )
    found = ResponsesOfData(DPOSection(), tokenizer, 8)(batch).batch
    a, b, c, d, e, f = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdef")
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert found["responses"].tolist() == [[a, b, end, pad], [b, end, pad, pad], [c, end, pad, pad], [d, e, f, end]]
    assert found["response_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    scores = [[0, 0, 1, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    assert found["token_level_scores"].tolist() == found["token_level_rewards"].tolist() == scores


def test_the_loss_of_a_step_is_that_of_transformers(tiny, settings):
    """The second step, when the policy is no longer the reference: its first update's loss from two plain models."""
    chosen = [*settings, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.save_freq=1"]
    trainer, reports = fit([*chosen, "trainer.total_training_steps=2", "dpo.beta=0.4"], DPOTrainer)
    names = [op.name for op in trainer.pipeline.operators]
    assert names == ["prompts", "repeat", "responses", "pairs", "ref", "update_actor"]
    folder = trainer.checkpoints.latest().parent / "global_step_1" / "actor" / "huggingface"
    rows = reports[1].batch.tensors

    def sequences(path):
        model = AutoModelForCausalLM.from_pretrained(path)
        log_probs = []
        for ids, real, asked in zip(rows["input_ids"], rows["attention_mask"].bool(), rows["response_mask"]):
            ids, count = ids[real], int(asked.sum())
            logits = model(ids[None]).logits[0, -count - 1 : -1].log_softmax(-1)
            log_probs.append(logits.gather(1, ids[-count:, None]).sum())
        return torch.stack(log_probs).detach()

    policy, reference = sequences(folder), sequences(tiny / "model")
    expected, _ = dpo_loss(policy[0::2], policy[1::2], reference[0::2], reference[1::2], beta=0.4)
    assert reports[1].metrics["dpo/loss"] == pytest.approx(expected.item(), rel=1e-4)
    assert reports[0].metrics["dpo/loss"] == pytest.approx(0.693147, rel=1e-5)


def test_it_learns_the_preference(settings):
    _, reports = fit([*settings, "trainer.total_training_steps=12", "dpo.beta=0.5"], DPOTrainer)
    assert reports[0].metrics["dpo/loss"] > 0.5 and reports[-1].metrics["dpo/loss"] < 0.1


@pytest.mark.parametrize(
    ("change", "override", "message"),
    [
        ({"chosen": "zz" * 4}, "", r"row 3: a response has 9 tokens with its end, but data\.max_response_length is 6"),
        ({"chosen": "ab", "rejected": "ab"}, "", "row 3: chosen and rejected are equal: 'ab'"),
        ({}, "dpo.chosen_key=chossen", "no column 'chossen': did you mean 'chosen'"),
        ({}, "actor_rollout_ref.rollout.n=4", "file gives two responses to a prompt"),
    ],
)
def test_what_cannot_be_used_is_said_before_a_model_is_loaded(change, override, message, tiny, settings, tmp_path):
    rows = [json.loads(line) for line in (tiny / "pairs.jsonl").read_text().splitlines()]
    rows[3] |= change
    write(tmp_path / "pairs.jsonl", rows)
    chosen = [*settings, f"data.train_files={tmp_path / 'pairs.jsonl'}", *([override] if override else [])]
    with pytest.raises(ValueError, match=message):
        DPOTrainer(overrides=chosen)


def test_rows_without_ground_truth_are_trained_on(tiny, settings, tmp_path):
    """As in UltraFeedback: nothing is scored without a validation. Online DPO and a validation need a ground truth."""
    rows = [
        {
            "prompt": f"{text}=",
            "chosen": [{"role": "user", "content": f"{text}="}, {"role": "assistant", "content": text[::-1]}],
            "rejected": [{"role": "user", "content": f"{text}="}, {"role": "assistant", "content": text}],
            "score_chosen": 8.5,
        }
        for text in ("ab", "bc", "cd", "de", "ef")
    ]
    write(tmp_path / "preferences.jsonl", rows)
    given = ["data.train_files", "data.val_files", "reward.custom_reward_function"]
    run = [setting for setting in settings if not setting.startswith(tuple(given))]
    run += [f"data.train_files={tmp_path / 'preferences.jsonl'}", "trainer.total_training_steps=2"]
    assert DPOTrainer(overrides=run).fit()["dpo/score_mean"] == 0.5
    for more in (f"data.val_files={tmp_path / 'preferences.jsonl'}", "dpo.answers=policy"):
        with pytest.raises(ValueError, match="no ground truth to score against"):
            DPOTrainer(overrides=[*run, more, "trainer.resume_mode=disable"])
