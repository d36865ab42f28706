"""What a run records in its folder, and the report that is written from it."""

import json
import logging
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.trainer.conftest import run_settings
from tests.trainer.runs import fit, lines
from verl.checkpoints.store import verify
from verl.protocol import DataProto
from verl.tracking import run_record as module
from verl.tracking.report import report_data, write_report
from verl.tracking.run_record import RunRecord, collected
from verl.tracking.runs import open_run, run_folders
from verl.trainer.local_trainer import LocalPPOTrainer
from verl.trainer.output.samples import MAX_TOKENS, distribution, step_record

logger = logging.getLogger("verl.test")


def test_states_and_warnings(tmp_path):
    earlier: list[logging.LogRecord] = []
    with collected(earlier):
        logger.warning("setting %s has no effect", "x")
        logger.info("not a warning")
    with RunRecord(tmp_path, {"experiment": "e"}, earlier) as record:
        record.resume(0)
        assert open_run(tmp_path).state == "running"
        record.add_step(1, lambda: {"a": 1}, last=False)
        logger.error("loss is nan")
    assert open_run(tmp_path).about["state"] == "finished"
    found = [(line["step"], line["level"], line["message"]) for line in lines(tmp_path / "warnings.jsonl")]
    assert found == [(0, "WARNING", "setting x has no effect"), (1, "ERROR", "loss is nan")]
    for error, state in ((ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted")):
        with pytest.raises(type(error)), RunRecord(tmp_path, {}):
            raise error
        assert open_run(tmp_path).about["state"] == state
    logger.warning("after the run")
    assert len(lines(tmp_path / "warnings.jsonl")) == 2


def test_warnings_have_the_step_in_progress(tmp_path):
    with RunRecord(tmp_path, {}, step=lambda: 16) as record:
        record.resume(0)
        record.add_step(15, lambda: {"a": 1}, last=False)
        logger.warning("step 16: the reward collapsed")
    assert [line["step"] for line in lines(tmp_path / "warnings.jsonl")] == [16]


def test_the_file_of_steps_is_bounded_and_continues(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STEPS_LIMIT", 2000)
    made = []
    with RunRecord(tmp_path, {}) as record:
        record.resume(0)
        for step in range(1, 101):
            record.add_step(step, lambda step=step: made.append(step) or {"text": "x" * 80}, last=step == 100)
    steps = [line["step"] for line in lines(tmp_path / "steps.jsonl")]
    assert (tmp_path / "steps.jsonl").stat().st_size <= 2000
    assert steps == [*range(1, 101, 8), 100] and len(made) < 50  # what is not recorded is not computed
    with RunRecord(tmp_path, {}) as record:
        record.resume(40)
        for step in range(41, 60):
            record.add_step(step, dict(text="y").copy, last=False)
    assert [line["step"] for line in lines(tmp_path / "steps.jsonl")] == [1, 9, 17, 25, 33, 41, 49, 57]


def test_a_run_that_is_not_resumed_leaves_the_results_of_the_one_before(tmp_path):
    folder = tmp_path / "run"
    for name in ("first", "second", "third"):
        with RunRecord(folder, {"experiment": name}) as record:
            logger.warning("of the %s", name)
            record.resume(0)
            (folder / "metrics.jsonl").write_text(json.dumps({"step": 0, "name": name}) + "\n")
            record.add_step(1, {"text": name}.copy, last=True)
    with pytest.raises(ValueError), RunRecord(folder, {"experiment": "fourth"}):
        raise ValueError("it did not start")  # moves nothing
    with RunRecord(folder, {"experiment": "third, resumed"}) as record:
        record.resume(1)
    with RunRecord(folder, {"experiment": "third, restarted"}, is_new=False) as record:
        record.resume(0)  # a restart of the same run repeats its steps
    assert sorted(path.name for path in (folder / "earlier_runs").iterdir()) == ["run_1", "run_2"]
    for name, place in {"first": "earlier_runs/run_1", "second": "earlier_runs/run_2"}.items():
        assert open_run(folder / place).about["experiment"] == name
        assert lines(folder / place / "metrics.jsonl") == [{"step": 0, "name": name}]
        assert [line["text"] for line in lines(folder / place / "steps.jsonl")] == [name]
        assert [line["message"] for line in lines(folder / place / "warnings.jsonl")] == [f"of the {name}"]
    assert lines(folder / "metrics.jsonl") == [{"step": 0, "name": "third"}]
    assert [line["message"] for line in lines(folder / "warnings.jsonl")] == ["of the third"]
    assert run_folders(folder)[0] == folder  # the newest first


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path, caplog):
    with RunRecord(tmp_path, {}) as record:
        record.resume(0)
        (tmp_path / "steps.jsonl").unlink()
        (tmp_path / "steps.jsonl").mkdir()
        for step in (1, 2):
            record.add_step(step, dict(a=1).copy, last=False)
    (message,) = caplog.messages
    assert "steps.jsonl cannot be written" in message and message.endswith("no further steps are recorded")


def test_distributions():
    assert distribution([1, 0, 1, float("nan")]) == [(0, 1), (1, 2)]
    many = distribution(list(range(100)))
    assert len(many) == 20 and many[0] == (2.475, 5) and sum(count for _, count in many) == 100
    assert distribution([]) == []


EVIL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(set(solution_str)) % 2, "note": "</script><script>alert(1)</script><!--"}
"""


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A run of 12 steps with validation, and its batches. Its reward function returns markup."""
    folder = tmp_path_factory.mktemp("reported")
    (folder / "reward.py").write_text(EVIL)
    chosen = [s for s in run_settings(tiny, folder / "run") if not s.startswith("reward.custom")]
    chosen += [f"reward.custom_reward_function.path={folder / 'reward.py'}", "trainer.total_training_steps=12"]
    chosen += ["trainer.test_freq=4", "algorithm.name=grpo", "trainer.log_val_generations=2", "trainer.log_tokens=3"]
    chosen += ["actor_rollout_ref.ref.enable=true"]
    trainer, reports = fit(chosen)
    return trainer, [report.batch for report in reports], folder / "run"


def test_a_step_is_recorded_with_the_tokens_of_samples(finished):
    trainer, batches, folder = finished
    records = lines(folder / "steps.jsonl")
    assert [record["step"] for record in records] == list(range(1, 13))
    for record, batch in zip(records, batches):
        columns, scores = batch.tensors, batch.tensors["token_level_scores"].sum(1).tolist()
        assert dict(record["scores"]) == {score: scores.count(score) for score in scores}
        found = [sample["score"] for sample in record["samples"]]
        calls = {(role, method): start + seconds for _, _, role, method, start, seconds in record["calls"]}
        assert 0 < calls["actor", "generate_sequences"] < calls["actor", "update_actor"]
        assert len(found) == 3 and max(found) == max(scores) and min(found) == min(scores)
        pairs = [scores[i : i + 2] for i in range(0, 8, 2)]
        assert record["groups"]["zero_variance"] == sum(a == b for a, b in pairs) and record["groups"]["count"] == 4
        for sample in record["samples"]:
            rows = [i for i, uid in enumerate(batch.non_tensor_batch["uid"]) if str(uid) == sample["uid"]]
            size = sample["length"]
            texts = [
                trainer.tokenizer.batch_decode([[t] for t in columns["responses"][i, :size].tolist()]) for i in rows
            ]
            row = rows[texts.index(sample["tokens"])]
            for name, column in (("rollout_log_probs", "rollout_log_probs"), ("advantages", "advantages")):
                assert sample[name] == pytest.approx(columns[column][row, :size].tolist(), rel=1e-3, abs=1e-6)
            assert sample["mask"] == [1] * size


def test_long_responses_are_cut(finished):
    trainer, batches, _ = finished
    batch = batches[0]
    wide = {name: column.repeat(1, 100)[:, :600] for name, column in batch.tensors.items() if column.ndim == 2}
    wide["prompts"] = batch.tensors["prompts"]
    wide["attention_mask"] = wide["input_ids"].new_ones(8, 600 + wide["prompts"].shape[1])
    wide = {
        k: v for k, v in wide.items() if k in {"prompts", "responses", "response_mask", "advantages", "attention_mask"}
    }
    wide["token_level_scores"] = batch.tensors["token_level_scores"]
    long = DataProto.from_dict(wide, dict(batch.non_tensor_batch))
    (sample,) = step_record(long, trainer.tokenizer, 1, seed=0)["samples"]
    assert sample["length"] == 600 and len(sample["tokens"]) == len(sample["advantages"]) == MAX_TOKENS == 512


def test_the_report_holds_no_markup_of_the_run(finished, tmp_path):
    page = write_report(finished[2], tmp_path / "r.html").read_text()
    assert "</script><script>alert" not in page and "\\u003c/script>\\u003cscript>alert(1)" in page
    assert page.count("</script>") == 2 and "http" not in page.replace("http-equiv", "").replace(
        "http://www.w3.org/2000/svg", ""
    )
    data = report_data(open_run(finished[2]))
    (score,) = [panel for panel in data["panels"] if panel["title"] == "score"]
    assert [len(curve["points"]) for curve in score["curves"]] == [12, 3]
    assert score["curves"][1]["label"] == "validation (greedy)"
    assert "python" in data["command"] and data["packages"]["torch"] == version("torch")
    assert "GPU hours" not in str(data["tiles"])
    assert data["changed"]["trainer.total_training_steps"] == {"value": 12, "default": None}
    assert {operator["name"] for operator in data["timing"]["operators"]} >= {"gen", "reward", "update_actor"}
    with pytest.raises(ValueError, match=r"has no metrics: expected lines in metrics\.jsonl"):
        (tmp_path / "run.json").write_text("{}")
        write_report(tmp_path)


@pytest.mark.slow
def test_the_report_in_a_browser(finished, tmp_path):
    from tests.browser import open_page

    path = write_report(finished[2], tmp_path / "r.html")
    steps = lines(finished[2] / "steps.jsonl")
    for width in (390, 1440):
        with open_page(path, width) as (page, messages):
            page.wait_for_selector("#panels path.raw")
            first = page.locator("#panels .panel").first
            assert first.locator("path.raw").get_attribute("d").count("L") == 11
            assert first.locator("circle.dot").count() == 3
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("#reproduce pre").inner_text() == report_data(open_run(finished[2]))["command"]
            first.locator("svg").hover()
            assert page.locator("#tooltip").inner_text().startswith("step ")
            assert page.locator("#browser .sample").count() == 3
            page.locator("#step").fill("0")
            assert page.locator("#step-value").inner_text() == "1"
            shown = page.locator("#browser .output").first
            assert shown.locator("span").all_text_contents() == [t or "∅" for t in steps[0]["samples"][0]["tokens"]]
            colors = {}
            for name in ("log-prob (rollout)", "mask"):
                page.locator("#color").select_option(name)
                colors[name] = shown.locator("span").first.evaluate("e => getComputedStyle(e).backgroundColor")
            assert colors["mask"] != colors["log-prob (rollout)"]
            shown.locator("span").first.click()
            assert "advantage" in page.locator("#token").inner_text()
            page.locator("#which").select_option("worst of the last quarter")
            assert page.locator("#browser .sample").count() == 5
            assert "</script><script>alert(1)" in page.locator("#browser .head").first.inner_text()
            page.locator("#which").select_option("of the last validation")
            assert page.locator("#browser .sample").count() == 2
            page.locator("#all summary").click()
            page.wait_for_selector("#metrics path.raw")
            assert messages == []


def test_a_folder_that_is_deleted_while_the_run_ends_hides_no_error(tmp_path, caplog):
    folder = tmp_path / "run"
    with pytest.raises(RuntimeError, match="out of memory"), RunRecord(folder, {}):
        shutil.rmtree(folder)
        raise RuntimeError("out of memory")
    assert not folder.exists() and "the state of the run (failed) is not recorded in" in caplog.text


DAMAGE = {
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 20),
    "wrong types": lambda path: path.write_text('{"step": "x"}\n[1]\n{"step": 1}\n{"step": 1, "every": 0}\n'),
    "nested": lambda path: path.write_text("[" * 100_000 + "\n"),
    "torn": lambda path: path.write_bytes(path.read_bytes() + b'{"step": 2, "x": "\xe4\xb8'),
}
RECORDS = ["metrics.jsonl", "metrics.dropped.jsonl", "steps.jsonl", "samples.jsonl", "warnings.jsonl", "run.json"]
RECORDS += ["best_checkpoint.json", "latest_checkpointed_iteration.txt"]


@pytest.fixture(scope="module")
def recorded(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    LocalPPOTrainer(overrides=saved_run(tiny, folder, 2)).fit()
    return folder


def saved_run(tiny: Path, folder: Path, steps: int) -> list[str]:
    more = ["algorithm.name=grpo", "trainer.save_freq=1", "trainer.save_best=true", "trainer.test_freq=1"]
    return [
        *run_settings(tiny, folder),
        *more,
        "trainer.logger=[console,jsonl]",
        f"trainer.total_training_steps={steps}",
    ]


@pytest.mark.parametrize(
    "kind", [name if name == "torn" else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGE]
)
def test_damaged_records_do_not_keep_a_run_from_resuming(kind, recorded, tiny, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "run", symlinks=True)
    for name in RECORDS:
        if (folder / name).exists() or kind != "torn":
            DAMAGE[kind](folder / name)
    trainer = LocalPPOTrainer(overrides=saved_run(tiny, folder, 3))
    assert trainer.fit()["training/global_step"] == 3
    assert verify(folder / "global_step_3")
    assert [line["step"] for line in lines(folder / "metrics.jsonl")][-1] == 3
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert lines(folder / "steps.jsonl")[-1]["step"] == 3
    assert write_report(folder).is_file()
