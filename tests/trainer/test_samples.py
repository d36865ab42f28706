"""The samples of a step and of a validation: in files, and in the tables that the trackers get."""

import json
import logging

import numpy as np
import pytest

from tests.trainer.conftest import run_settings
from tests.trainer.runs import fit, lines
from verl.trainer.output.samples import choose_rows, generations, plain

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = len(set(solution_str)) % 2
    return {"score": right / 2, "acc": right, "first": solution_str[:1], "chars": len(solution_str)}
"""


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    """The trainer, the batches of its steps, the folder, and what was logged."""
    tmp_path, messages = tmp_path_factory.mktemp("samples"), []
    settings, logger, handler = run_settings(tiny, tmp_path / "run"), logging.getLogger("verl"), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    reward = tmp_path / "parts.py"
    reward.write_text(REWARD)
    chosen = [s for s in settings if not s.startswith(("reward.custom", "trainer.logger"))]
    chosen += [f"reward.custom_reward_function.path={reward}", "trainer.logger=[console,jsonl]"]
    chosen += ["trainer.total_training_steps=2", "trainer.test_freq=2", "algorithm.name=grpo"]
    chosen += ["trainer.log_samples=3", "trainer.log_val_generations=2"]
    chosen += [f"trainer.rollout_data_dir={tmp_path}/steps", f"trainer.validation_data_dir={tmp_path}/val"]
    level = logger.level
    logger.addHandler(handler)
    trainer, reports = fit(chosen)  # which sets the level
    logger.removeHandler(handler)
    logger.setLevel(level)
    return trainer, [report.batch for report in reports], tmp_path, messages


def test_every_sample_is_described_in_full(run):
    trainer, batches, folder, _ = run
    for step, batch in enumerate(batches, 1):
        samples = lines(folder / "steps" / f"{step}.jsonl")
        assert len(samples) == len(batch) == 8
        for i, sample in enumerate(samples):
            row = batch.tensors
            ids = row["responses"][i][row["response_mask"][i].bool()]
            text = trainer.tokenizer.decode(ids, skip_special_tokens=True)
            answer = batch.non_tensor_batch["reward_model"][i]["ground_truth"]
            ended = bool(len(ids)) and ids[-1].item() == trainer.tokenizer.eos_token_id
            assert sample == {
                "input": trainer.tokenizer.decode(batch.non_tensor_batch["prompt_ids"][i], skip_special_tokens=True),
                "output": text,
                "gts": answer,
                "score": len(set(text)) % 2 / 2,
                "acc": len(set(text)) % 2,
                "first": text[:1],
                "chars": len(text),
                "advantage": pytest.approx(row["advantages"][i][0].item()),
                "length": len(ids),
                "finish_reason": "stop" if ended else "length",
                "data_source": batch.non_tensor_batch["data_source"][i],
                "uid": str(batch.non_tensor_batch["uid"][i]),
                "step": step,
            }
    assert any(sample["advantage"] for sample in samples)


def test_the_trackers_get_as_many_samples_as_asked(run):
    _, _, folder, messages = run
    tables = lines(folder / "run" / "samples.jsonl")
    assert [(t["name"], t["step"], len(t["rows"])) for t in tables] == [
        ("train/generations", 1, 3),
        ("train/generations", 2, 3),
        ("val/generations", 2, 2),
    ]
    for table in tables[:2]:
        written = lines(folder / "steps" / f"{table['step']}.jsonl")
        assert all({**row, "step": table["step"]} in written for row in table["rows"])
    validation = lines(folder / "val" / "2.jsonl")
    assert len(validation) == 6 and all(row in validation for row in tables[2]["rows"])
    assert set(validation[0]) == set(tables[0]["rows"][0]) - {"advantage"}
    (shown,) = [m for m in messages if m.startswith("step 2, val/generations 1 of 2\n")]
    assert f"\n  input: {tables[2]['rows'][0]['input']}\n" in shown and "\n  finish_reason: " in shown


def test_rows_are_chosen_at_random_and_reproducibly():
    assert choose_rows(5, 9, 0) == [0, 1, 2, 3, 4]
    assert choose_rows(5, 0, 0) == []
    chosen = [choose_rows(100, 3, seed) for seed in range(400)]
    assert chosen == [choose_rows(100, 3, seed) for seed in range(400)]
    assert all(len(set(rows)) == 3 and rows == sorted(rows) for rows in chosen)
    assert {row for rows in chosen for row in rows} == set(range(100))


def test_values_of_a_reward_function_as_json():
    circular: list = []
    circular.append(circular)
    values = [np.float32(1.5), np.bool_(True), 3, "a\ud800", (1, 2), {(1, 2): 3}, circular, float("nan"), object]
    values.append(10**400)
    found = [plain(value) for value in values]
    assert found[:5] == [1.5, True, 3, "a\\ud800", (1, 2)] and found[5] == "{(1, 2): 3}" and found[7] == "nan"
    text = json.dumps(found, ensure_ascii=False).encode().decode()
    assert "[[...]]" in text and "<class 'object'>" in text and found[9] == 10**400


def test_values_with_the_name_of_a_field_keep_the_field(run):
    trainer, batches, *_ = run
    batch = batches[0].replace(reward_output=["mine"] * 8, reward_length=[99] * 8)
    (sample,) = generations(batch, trainer.tokenizer, [0])
    plain_one = generations(batches[0], trainer.tokenizer, [0])[0]
    assert sample == plain_one | {"reward_output": "mine", "reward_length": 99}
