"""reward.on_error=quarantine: the same command continues without the prompts that cannot be scored."""

import json
import shutil

import pytest

from benchmarks.faults import Faults
from tests.trainer.runs import lines, metrics_of, uids_of
from verl.data.order import PromptSource
from verl.protocol import DataProto
from verl.rewards.outcome import QuarantineError, RewardError
from verl.trainer.guards.base import Guard
from verl.trainer.local_trainer import LocalPPOTrainer

POISONED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth in {poisoned!r}:
        raise ValueError("poisoned")
    return sum(c.isalpha() for c in solution_str) / max(len(solution_str), 1)
"""


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("verl.rewards.managers._RETRY_SECONDS", 0.0)


@pytest.fixture
def chosen(settings, tiny, tmp_path):
    """Settings of 8 steps of 4 of 24 rows, of which rows 5 and 11 are poisoned; and the uids of each step."""
    answers = [row["answer"] for row in lines(tiny / "train.jsonl")]
    (tmp_path / "reward.py").write_text(POISONED.format(poisoned=[answers[5], answers[11]]))
    assert answers.count(answers[5]) == answers.count(answers[11]) == 1
    further = ["algorithm.adv_estimator=grpo", "trainer.save_freq=1", "trainer.total_training_steps=8"]
    function = f"reward.custom_reward_function.path={tmp_path / 'reward.py'}"
    return [*settings, *further, function, "reward.on_error=quarantine", "reward.max_failure_rate=0.5"]


def run(chosen: list[str], steps: dict[int, list[str]], *guards: Guard) -> LocalPPOTrainer:
    trainer = LocalPPOTrainer(overrides=chosen)
    trainer.guards.extend(guards)
    trainer.on_step.append(lambda report: steps.update({report.step: uids_of(report)}))
    trainer.fit()
    return trainer


def run_to_the_end(chosen: list[str], steps: dict[int, list[str]]) -> list[QuarantineError]:
    """The same command again and again; the errors on the way, with the step that failed."""
    errors = []
    while True:
        try:
            run(chosen, steps)
            return errors
        except QuarantineError as error:
            error.step = max(steps, default=0) + 1
            errors.append(error)
            assert len(errors) < 4


def test_the_same_command_continues_without_the_poisoned_rows(chosen, tmp_path, caplog):
    steps: dict[int, list[str]] = {}
    errors = run_to_the_end(chosen, steps)
    folder = tmp_path / "run"
    listed = lines(folder / "quarantine.jsonl")
    assert sorted(item["row"] for item in listed) == [5, 11]
    assert all(f"{'train.jsonl'}, line {item['row'] + 1}" in item["place"] for item in listed), listed
    assert all("poisoned" in item["reason"] and item["uid"].endswith(f":{item['row']}") for item in listed)
    assert [error.step for error in errors] == sorted({item["step"] for item in listed})
    assert any("the same command continues without them" in note for note in errors[0].__notes__)
    assert "dropping 2 of 24 rows of the training data" in caplog.text
    # all steps were trained on whole batches, no prompt was used twice in an epoch, and the poisoned ones never
    used = [uid for step in range(1, 9) for uid in steps[step]]
    assert sorted(metrics_of(folder)) == list(range(1, 9)) and len(used) == len(set(used)) == 32
    assert {int(uid.partition(":")[2]) for uid in used[:22]} == set(range(24)) - {5, 11}

    # the file is what counts: a run that has it from its start trains on the same prompts once they are dropped,
    # and one that is stopped and resumed is equal to it bit for bit
    written = (folder / "quarantine.jsonl").read_text()
    first = min(item["step"] for item in listed)

    def again(*totals: int) -> tuple[dict, dict]:
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / "quarantine.jsonl").write_text(written)
        found: dict[int, list[str]] = {}
        for total in totals:
            run([*chosen, f"trainer.total_training_steps={total}"], found)
        return metrics_of(folder), found

    straight, resumed = again(8), again(3, 5, 8)
    assert resumed == straight
    assert [straight[1][step] for step in range(1, first)] == [steps[step] for step in range(1, first)]


@pytest.mark.slow
def test_the_bad_rows_of_a_step_are_collected_in_one_stop(chosen, tmp_path, tiny):
    answers = [row["answer"] for row in lines(tiny / "train.jsonl")]
    (tmp_path / "reward.py").write_text(POISONED.format(poisoned=[answers[row] for row in (0, 1, 6, 7)]))
    in_order = [*chosen, "data.shuffle=false", "trainer.total_training_steps=3"]
    steps: dict[int, list[str]] = {}
    errors = run_to_the_end(in_order, steps)
    assert [sorted(error.failures) for error in errors] == [["0:0", "0:1"], ["0:6", "0:7"]]
    # row 0 is that of the trial before training, which goes on with another one
    assert steps[1] == ["0:2", "0:3", "0:4", "0:5"] and steps[2] == ["0:10", "0:11", "0:8", "0:9"]


def test_a_row_whose_process_was_killed_once_is_not_quarantined(chosen, tmp_path):
    fault = Faults("kill-reward@3")
    (tmp_path / "reward.py").write_text(POISONED.format(poisoned=[]))
    run([*chosen, "reward.isolation=process", "reward.timeout=30"], {}, fault)
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()
    assert fault.pending == []


def test_the_same_trainer_continues_without_the_poisoned_rows(chosen, tmp_path):
    trainer, done = LocalPPOTrainer(overrides=chosen), []
    trainer.on_step.append(lambda report: done.append(report.step))
    failed = []
    while trainer.global_step < 8:
        try:
            trainer.fit()
        except QuarantineError:
            failed.append(done[-1] + 1 if done else 1)
            assert len(failed) < 3
    listed = lines(tmp_path / "run" / "quarantine.jsonl")
    assert sorted(item["row"] for item in listed) == [5, 11]
    assert sorted({item["step"] for item in listed}) == failed and done == list(range(1, 9))


def test_a_function_that_fails_everywhere_quarantines_nothing(chosen, tmp_path, tiny):
    answers = [row["answer"] for row in lines(tiny / "train.jsonl")]
    (tmp_path / "reward.py").write_text(POISONED.format(poisoned=answers[1:]))  # a trial before training has the first
    with pytest.raises(RewardError, match=r"[34] of 4 prompts of a step failed to score") as caught:
        run(chosen, {})
    assert not isinstance(caught.value, QuarantineError) and not (tmp_path / "run" / "quarantine.jsonl").exists()


def test_a_validation_quarantines_no_training_row(chosen, tmp_path, tiny):
    answers = [row["answer"] for row in lines(tiny / "test.jsonl")]
    (tmp_path / "reward.py").write_text(POISONED.format(poisoned=answers[:1]))
    with pytest.raises(RewardError, match="poisoned"):
        run([*chosen, "trainer.val_before_train=true"], {})
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"row": "5"}', '{"row": 24}', '{"row": -1}', "{}"])
def test_a_damaged_file_is_refused_with_its_line(chosen, tmp_path, line):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "quarantine.jsonl").write_text(f'{{"row": 0}}\n{line}\n')
    with pytest.raises(ValueError, match=r"quarantine\.jsonl, line 2: expected an object with .row"):
        LocalPPOTrainer(overrides=chosen)


def test_a_folder_in_place_of_the_file_is_refused(chosen, tmp_path):
    (tmp_path / "run" / "quarantine.jsonl").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"quarantine\.jsonl is not a regular file: .*; remove it to use all rows"):
        LocalPPOTrainer(overrides=chosen)


def test_queues_of_prompts_are_refused(chosen):
    with pytest.raises(ValueError, match=r"reward\.on_error.*not supported, use count"):
        LocalPPOTrainer(overrides=[*chosen, "algorithm.filter_groups.enable=true"])


def test_too_few_rows_are_refused():
    source = PromptSource([{}] * 6, 4, collate=list)
    source.drop([1])
    with pytest.raises(ValueError, match="3 of 6 rows of the training data are dropped"):
        source.drop([1, 2, 3])


@pytest.mark.parametrize("stop", range(1, 8))
def test_the_rows_that_wait_are_part_of_the_position(stop):
    def make() -> PromptSource:
        source = PromptSource(
            [{}] * 10, 3, collate=lambda rows: DataProto.from_dict({}, {"uid": [r["uid"] for r in rows]})
        )
        source.drop([2, 7])
        return source

    straight = make()
    expected = [list(straight().non_tensor_batch["uid"]) for _ in range(10)]
    before, after = make(), make()
    found = [list(before().non_tensor_batch["uid"]) for _ in range(stop)]
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert found + [list(after().non_tensor_batch["uid"]) for _ in range(10 - stop)] == expected
