"""Metrics arrive at every tracker, once, also over a resume; and no tracker can stop the training."""

import base64
import importlib
import io
import json
import logging
import os
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image

from verl.tracking.formatting import format_headline, format_number
from verl.tracking.run_record import RunRecord
from verl.tracking.trackers import TRACKER_REGISTRY, Tracker, thumbnail
from verl.tracking.tracking import Tracking, check_trackers

CONFIG = {"trainer.seed": 1, "data.train_files": ["a.parquet"], "critic.path": None}


def tracking(folder, *names, resume_step=0):
    return Tracking(names, "project", "run", CONFIG, folder, resume_step=resume_step)


def lines(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def events_of(folder):
    """What TensorBoard reads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_jsonl_holds_each_call_at_once(tmp_path):
    run = tracking(tmp_path, "jsonl")
    run.log({"critic/score/mean": np.float32(0.5), "actor/kl": torch.tensor(0.25)}, 1)
    run.log({"val-core/gsm8k/acc/mean@1": 1}, 1)
    run.log_samples("val/generations", [{"input": "1+1=", "output": "2", "score": 1.0}], 1)
    found = lines(tmp_path)  # before finish: every line is flushed
    assert [{k: v for k, v in line.items() if k != "time"} for line in found] == [
        {"step": 1, "critic/score/mean": 0.5, "actor/kl": 0.25},
        {"step": 1, "val-core/gsm8k/acc/mean@1": 1.0},
    ]
    assert lines(tmp_path, "samples.jsonl")[0]["rows"] == [{"input": "1+1=", "output": "2", "score": 1.0}]
    run.finish()


def test_jsonl_resumed_holds_no_step_twice_and_loses_nothing(tmp_path):
    with tracking(tmp_path, "jsonl") as run:
        for step in range(1, 6):
            run.log({"loss": step}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while it wrote
    with tracking(tmp_path, "jsonl", resume_step=3) as run:
        for step in range(4, 8):
            run.log({"loss": 10 * step}, step)
    losses = {x["step"]: x["loss"] for x in lines(tmp_path)}
    assert losses == {1: 1, 2: 2, 3: 3, 4: 40, 5: 50, 6: 60, 7: 70} and len(lines(tmp_path)) == 7
    assert (tmp_path / "metrics.dropped.jsonl").read_text().count("\n") == 3
    with tracking(tmp_path, "jsonl") as run:  # from the beginning, in the same folder
        run.log({"val-core/acc": 0}, 0)
        run.log({"loss": 0}, 1)
    assert [x["step"] for x in lines(tmp_path)] == [0, 1]
    assert (tmp_path / "metrics.dropped.jsonl").read_text().count("\n") == 10
    with tracking(tmp_path, "jsonl") as run:  # once more, with the validation before step 1
        run.log({"val-core/acc": 0.5}, 0)
    assert [(x["step"], x["val-core/acc"]) for x in lines(tmp_path)] == [(0, 0.5)]
    assert (tmp_path / "metrics.dropped.jsonl").read_text().count("\n") == 12


def test_images_of_samples(tmp_path):
    """Files have them, texts their number, and TensorBoard the first of each sample."""
    images = [thumbnail(Image.new("RGB", (256, 64), color)) for color in [(250, 0, 0), (0, 0, 250)]]
    shown = Image.open(io.BytesIO(base64.b64decode(images[0].partition(",")[2])))
    assert shown.size == (128, 32) and shown.getpixel((5, 5)) == (250, 0, 0)
    rows = [{"input": "a", "images": images}, {"input": "b", "images": []}]
    with tracking(tmp_path, "tensorboard", "jsonl") as run:
        run.log_samples("samples/train", rows, 1)
    events = events_of(tmp_path)
    assert events.Tags()["images"] == ["samples/train/0"]  # the second sample has none
    (logged,) = events.Images("samples/train/0")
    picture = Image.open(io.BytesIO(logged.encoded_image_string))
    assert (logged.step, picture.size, picture.getpixel((5, 5))) == (1, (128, 32), (250, 0, 0))
    (text,) = events.Tensors("samples/train/text_summary")
    assert "2 images" in str(text.tensor_proto.string_val) and "base64" not in str(text.tensor_proto.string_val)
    (line,) = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert json.loads(line)["rows"] == rows


def test_tensorboard_resumed_shows_each_step_once(tmp_path):
    with tracking(tmp_path, "tensorboard") as run:
        for step in range(1, 6):
            run.log({"actor/loss": step}, step)
        run.log_samples("val/generations", [{"input": "a|b", "output": "c\nd"}], 5)
    with tracking(tmp_path, "tensorboard", resume_step=3) as run:
        for step in range(4, 7):
            run.log({"actor/loss": 10 * step}, step)
    shown = [(e.step, e.value) for e in events_of(tmp_path).Scalars("actor/loss")]
    assert shown == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]


def test_console_line_has_one_order_and_short_numbers(tmp_path, caplog):
    metrics = {"timing_s/step": 1.2345, "perf/throughput": 152_345.0, "actor/pg_loss": -0.012345}
    metrics |= {"critic/score/mean": 0.625, "reward/acc": 0.5, "critic/rewards/mean": 0.61}
    metrics |= {"response_length/mean": 5.123, "actor/ref_kl": 0.00123, "actor/entropy": 0.5, "actor/grad_norm": 0.41}
    metrics |= {"critic/score/max": 1.0}
    with caplog.at_level(logging.INFO, logger="verl"), tracking(tmp_path, "console") as run:
        run.log(metrics, 12)
        run.log({"val-core/gsm8k/acc/mean@1": 0.25, "val-aux/gsm8k/reward/mean@1": 0.3, "timing_s/testing": 3.0}, 12)
        run.log({"my/number": 3, "timing_s/step_2": 1.0}, 13)
    assert [record.getMessage() for record in caplog.records] == [
        "step 12 | reward 0.625 | acc 0.5 | net_reward 0.61 | length 5.12 | kl 0.00123 | entropy 0.5 | pg_loss -0.0123"
        " | grad_norm 0.41 | tok/s 152k | seconds 1.23",
        "step 12 | val-core/gsm8k/acc/mean@1 0.25",
        "step 13 | my/number 3",
    ]


def test_the_console_shows_a_number_once():
    same = {"critic/score/mean": 0.5, "reward/acc": 0.5 + 1e-9, "critic/rewards/mean": 0.5, "actor/entropy": 0.5}
    assert format_headline(same) == {"reward": "0.5", "entropy": "0.5"}
    differing = {**same, "critic/rewards/mean": 0.4}
    assert format_headline(differing) == {"reward": "0.5", "net_reward": "0.4", "entropy": "0.5"}
    assert list(format_headline({**same, "critic/score/mean": 0.6})) == ["reward", "acc", "entropy"]
    assert list(format_headline({**same, "reward/acc": float("nan")})) == ["reward", "acc", "entropy"]


def test_short_numbers():
    values = [0, 1, 0.5, 1.239, 12.5, 999, 1000, 9994, 9995, 152_345, 2.5e6, 3e9, -0.01234, float("nan")]
    words = ["0", "1", "0.5", "1.24", "12.5", "999", "1000", "9994", "9.99k", "152k", "2.5M", "3G", "-0.0123", "nan"]
    assert [format_number(v) for v in values] == words
    assert format_headline({}) == {}


def test_samples_on_the_console_cannot_control_the_terminal(tmp_path, caplog):
    with caplog.at_level(logging.INFO), tracking(tmp_path, "console") as run:
        row = {"input": "1 + 1\n=", "output": "\x1b]0;title\x07é中\r2", "score": 0.12345}
        run.log_samples("val/generations", [row], 3)
    shown = "step 3, val/generations 1 of 1\n  input: 1 + 1\\n=\n  output: \\x1b]0;title\\x07é中\\r2\n  score: 0.123"
    assert caplog.messages == [shown]


def test_samples_on_the_console_are_shortened_and_whole_in_the_file(tmp_path, caplog):
    text = "a\tb\n" * 100
    with caplog.at_level(logging.INFO), tracking(tmp_path, "console", "jsonl") as run:
        run.log_samples("train/generations", [{"output": text, "gts": "x" * 200}], 3)
    _, output, truth = caplog.messages[0].split("\n")
    assert output.startswith(r"  output: a\tb\na\tb\n") and len(output) == len("  output: ") + 200
    assert output.endswith("...") and truth == "  gts: " + "x" * 200
    assert lines(tmp_path, "samples.jsonl")[0]["rows"][0]["output"] == text


def test_text_that_is_not_unicode_is_written_as_an_escape(tmp_path, caplog):
    with RunRecord(tmp_path, {"experiment": "x\ud800"}) as record, tracking(tmp_path, "jsonl", "tensorboard") as run:
        logging.getLogger("verl.x").warning("a\ud800")
        run.log_samples("train/generations", [{"output": "b\ud800"}], 1)
        run.log({"c\ud800": 1.0}, 1)
        record.add_step(1, lambda: {"d\ud800": "e\ud800"}, last=True)
    assert run.failures == {}
    assert lines(tmp_path, "warnings.jsonl")[0]["message"] == "a\ud800"
    assert lines(tmp_path, "samples.jsonl")[0]["rows"] == [{"output": "b\\ud800"}]
    assert lines(tmp_path, "metrics.jsonl")[0]["c\\ud800"] == 1.0
    assert lines(tmp_path, "steps.jsonl")[0]["d\ud800"] == "e\ud800"
    assert json.loads((tmp_path / "run.json").read_bytes())["experiment"] == "x\ud800"


class Flaky(Tracker):
    """A service that stops answering in the middle of the run."""

    def log(self, metrics, step):
        if step > 1:
            raise ConnectionError("no route to the tracking service")

    def log_samples(self, name, rows, step):
        raise TimeoutError

    def finish(self, failed):
        (self.run.folder / "ending").write_text("failed" if failed else "well")


def test_a_failing_tracker_is_said_once_and_counted_and_the_others_go_on(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(TRACKER_REGISTRY, "flaky", Flaky)
    with caplog.at_level(logging.WARNING), tracking(tmp_path, "flaky", "jsonl") as run:
        for step in range(1, 5):
            run.log({"loss": 1.0}, step)
        run.log_samples("s", [{"a": 1}], 4)
    assert [x["step"] for x in lines(tmp_path)] == [1, 2, 3, 4]
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("tracker flaky failed (ConnectionError: no route to the tracking service)")
    assert last == "tracker flaky: 4 calls failed"
    assert "Traceback" not in caplog.text  # of a service or a disk, the stack does not help
    assert (tmp_path / "ending").read_text() == "well"


def test_a_tracker_with_an_error_in_its_code_is_logged_with_its_stack(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(TRACKER_REGISTRY, "flaky", Flaky)
    monkeypatch.setattr(Flaky, "log", lambda self, metrics, step: metrics["no such metric"])
    with caplog.at_level(logging.WARNING), tracking(tmp_path, "flaky") as run:
        run.log({"loss": 1.0}, 1)
    assert "Traceback" in caplog.text and "tracker flaky failed (KeyError: 'no such metric')" in caplog.text


class Blocked(Tracker):
    """A service that does not respond. `gate` opens it; `called` is set by the first call; `calls` counts."""

    gate: threading.Event
    called: threading.Event
    calls: list[int]

    def log(self, metrics, step):
        self.called.set()
        self.gate.wait(60)
        self.calls.append(step)
        if step == 2:
            sys.exit(3)

    def log_samples(self, name, rows, step):
        pass

    def finish(self, failed):
        pass


@pytest.fixture
def blocked(monkeypatch):
    kind = type("Kind", (Blocked,), {"gate": threading.Event(), "called": threading.Event(), "calls": []})
    monkeypatch.setitem(TRACKER_REGISTRY, "blocked", kind)
    yield kind
    kind.gate.set()
    for thread in threading.enumerate():  # it would log into the next test
        if thread.name == "blocked":
            thread.join(20)


def test_a_hanging_tracker_does_not_stop_training(tmp_path, caplog, monkeypatch, blocked):
    monkeypatch.setattr("verl.tracking.tracking.FINISH_SECONDS", 0.2)
    monkeypatch.setattr("verl.tracking.tracking.SLOW_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING), tracking(tmp_path, "blocked", "jsonl") as run:
        for step in range(1, 4):
            run.log({"loss": 1.0}, step)
            assert blocked.called.wait(60)
    assert blocked.calls == []  # the service has not responded until the end of the run
    assert [x["step"] for x in lines(tmp_path)] == [1, 2, 3]
    waiting, lost = [record.getMessage() for record in caplog.records]
    assert waiting.startswith("tracker blocked has not responded for ") and waiting.endswith("1 calls are waiting")
    assert lost.startswith("tracker blocked did not finish within 0 s: up to ")


def test_a_slow_tracker_gets_every_call_in_order(tmp_path, blocked, caplog):
    with caplog.at_level(logging.WARNING), tracking(tmp_path, "blocked") as run:
        for step in range(1, 50):
            run.log({"loss": 1.0}, step)
        assert blocked.calls == []
        blocked.gate.set()
    assert blocked.calls == list(range(1, 50))
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("tracker blocked failed (SystemExit: 3)") and last == "tracker blocked: 1 calls failed"


def test_an_interrupt_that_a_service_raises_is_its_failure(tmp_path, monkeypatch, blocked, caplog):
    def interrupt(self, metrics, step):
        blocked.calls.append(step)
        raise KeyboardInterrupt

    monkeypatch.setattr(blocked, "log", interrupt)
    with caplog.at_level(logging.WARNING), tracking(tmp_path, "blocked") as run:
        for step in range(1, 4):
            run.log({"loss": 1.0}, step)
    assert blocked.calls == [1, 2, 3] and caplog.messages[-1] == "tracker blocked: 3 calls failed"


def test_a_tracker_that_cannot_start_is_named(tmp_path, monkeypatch, blocked):
    def wait(self, run):
        blocked.gate.wait(20)
        raise PermissionError("no key")

    monkeypatch.setattr(blocked, "__init__", wait)
    monkeypatch.setattr("verl.tracking.tracking.START_SECONDS", 0.1)
    with pytest.raises(ValueError, match=r"the tracker 'blocked' has not started after 0 s: .* trainer.logger"):
        tracking(tmp_path, "blocked")
    monkeypatch.setattr("verl.tracking.tracking.START_SECONDS", 60.0)
    blocked.gate.set()
    with pytest.raises(ValueError, match=r"'blocked' cannot start: PermissionError: no key. Fix this, or remove"):
        tracking(tmp_path, "blocked")


TORN = [b'{"step": 2, "a": "\xc3', b"5\n", b'{"loss": 1}\n', b'{"step": "2"}\n', b'{"step": 2}']


@pytest.mark.parametrize("torn", TORN)
def test_a_damaged_line_does_not_keep_a_run_from_resuming(tmp_path, torn, caplog):
    with tracking(tmp_path, "jsonl") as run:
        run.log({"loss": 1}, 1)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    path = tmp_path / "metrics.jsonl"
    with caplog.at_level(logging.WARNING), tracking(tmp_path, "jsonl", resume_step=2) as run:
        run.log({"loss": 3}, 3)
    assert [(x["step"], x["loss"]) for x in lines(tmp_path)] == [(1, 1), (3, 3)]
    assert (tmp_path / "metrics.dropped.jsonl").read_bytes() == torn.rstrip(b"\n") + b"\n"
    assert caplog.messages == [
        f"{path}: 1 damaged lines were moved to metrics.dropped.jsonl",
        f"{path} ends at step 1: the steps up to 2 are missing",
    ]


def test_trackers_learn_that_the_run_failed(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKER_REGISTRY, "flaky", Flaky)
    with pytest.raises(ZeroDivisionError), tracking(tmp_path, "flaky"):
        raise ZeroDivisionError
    assert (tmp_path / "ending").read_text() == "failed"


def test_numbers_that_are_not_finite_are_said_loudly(tmp_path, caplog):
    with caplog.at_level(logging.ERROR), tracking(tmp_path, "jsonl") as run:
        run.log({"actor/grad_norm": float("nan"), "loss": 1.0}, 1)
        run.log({"actor/grad_norm": float("inf"), "loss": 1.0}, 2)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["step 1: actor/grad_norm is nan", "actor/grad_norm was not finite in 2 steps"]
    assert [line["actor/grad_norm"] for line in lines(tmp_path)] == [None, None]
    with pytest.raises(ValueError, match="metric 'acc': expected a number, found 'high'"):
        tracking(tmp_path, "jsonl").log({"acc": "high"}, 3)


def test_names_and_packages_are_checked_before_anything_starts(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no tracker is called 'tensorbord': did you mean 'tensorboard'"):
        check_trackers(["console", "tensorbord"])

    monkeypatch.setitem(TRACKER_REGISTRY, "plain", dict)
    with pytest.raises(ValueError, match=r"tracker 'plain': expected a subclass of .*Tracker, found <class 'dict'>"):
        check_trackers(["plain"])

    class Service(Flaky):
        package = "metrics_service"

    monkeypatch.setitem(TRACKER_REGISTRY, "service", Service)
    (tmp_path / "metrics_service").mkdir()  # such a folder, left in the working directory, is not the package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="needs the package metrics_service, which is not installed: pip install"):
        check_trackers(["service"])
    (tmp_path / "metrics_service" / "__init__.py").touch()
    importlib.invalidate_caches()
    check_trackers(["service"])


@pytest.mark.slow
def test_images_of_samples_in_wandb(tmp_path):
    """The file of the table that wandb would upload, written by a process of its own."""
    pytest.importorskip("wandb")
    program = (
        "import sys; from PIL import Image; from verl.tracking.trackers import thumbnail\n"
        "from verl.tracking.tracking import Tracking\n"
        "image = thumbnail(Image.new('RGB', (256, 64), (250, 0, 0)))\n"
        "with Tracking(['wandb'], 'project', 'run', {}, sys.argv[1]) as run:\n"
        "    run.log_samples('s', [{'input': 'a', 'images': [image] * 2}, {'input': 'b', 'images': []}], 1)\n"
        "assert not run.failures, run.failures\n"
    )
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DATA_DIR": str(tmp_path / "data")}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env=environment)
    (table,) = (json.loads(path.read_text()) for path in (tmp_path / "wandb").rglob("*.table.json"))
    assert table == {"columns": ["input", "images"], "data": [["a", "Image"], ["b", None]]}
    pictures = [
        Image.open(path)
        for path in (tmp_path / "data").rglob("*")
        if path.is_file() and path.read_bytes()[:4] == b"\x89PNG"
    ]
    assert [(each.size, each.getpixel((5, 5))) for each in pictures] == [((128, 32), (250, 0, 0))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab"])
def test_services_work_offline_and_resume_as_the_same_run(tmp_path, name):
    pytest.importorskip(name)
    program = (
        "import sys; from verl.tracking.tracking import Tracking\n"
        "name, folder, resume = sys.argv[1], sys.argv[2], int(sys.argv[3])\n"
        "config = {'a.b': 1 + resume, 'c': None} | {f'k.{i}': i for i in range(150)}\n"
        "with Tracking([name], 'project', 'run', config, folder, resume_step=resume) as run:\n"
        "    for step in (resume + 1, resume + 2):\n"
        "        run.log({'critic/score/mean': step / 10, 'val-core/x/acc/mean@2': 1.0}, step)\n"
        "    run.log_samples('val/generations', [{'input': 'a', 'output': 'b', 'score': 1.0}], resume + 2)\n"
        "assert not run.failures, run.failures\n"
    )
    ids, folder = [], tmp_path / "project" / "run"
    for resume in (0, 2):
        subprocess.run(
            [sys.executable, "-c", program, name, str(folder), str(resume)],
            check=True,
            env={**os.environ, "WANDB_MODE": "offline", "SWANLAB_MODE": "offline"},
        )
        ids.append(json.loads((folder / "tracker_ids.json").read_text())[name])
    assert ids[0] == ids[1]
    if name == "mlflow":
        database = sqlite3.connect(tmp_path / "project" / "mlflow.db")  # of all runs of the project
        rows = database.execute("select step, value, run_uuid from metrics where key like 'critic%'")
        assert sorted(rows) == [(step, step / 10, ids[0]) for step in (1, 2, 3, 4)]
        params = dict(database.execute("select key, value from params"))
        assert len(params) == 152 and params["a.b"] == "1"  # of the first start
    else:
        assert len([path for path in (folder / name).iterdir() if ids[0] in path.name and path.is_dir()]) == 2


def test_a_tracker_with_two_names_runs_once(tmp_path):
    with Tracking(["jsonl", "console", "file"], "p", "e", {}, tmp_path) as tracking:
        tracking.log({"loss": 1.0}, 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1
