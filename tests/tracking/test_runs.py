"""verl runs: what is read from the folders of runs, and what the commands print."""

import json
import os
import time

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from tests.tracking.test_console import CODES, HOSTILE
from verl.cli.app import app
from verl.tracking.curves import save_comparison
from verl.tracking.report import report_data, write_report
from verl.tracking.report.report import describe
from verl.tracking.runs import differing_settings, labels, open_run, run_folders


def make_run(folder, lr=1e-3, gain=0.01, **about):
    folder.mkdir(parents=True)
    records = [
        {"step": s, "time": 0.0, "critic/score/mean": 0.2 + gain * s, "actor/ref_kl": 0.001 * s, "timing_s/step": 2.0}
        for s in range(1, 31)
    ]
    records += [{"step": s, "time": 0.0, "val-core/d/acc/mean@1": 0.4 - abs(s - 20) / 100} for s in (0, 10, 20, 30)]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + '{"step": 31, "cri'
    )
    config = {"algorithm.name": "grpo", "actor_rollout_ref.model.path": "/models/tiny"}
    config |= {"actor_rollout_ref.actor.optim.lr": lr, "actor_rollout_ref.rollout.val_kwargs.do_sample": False}
    config |= {"trainer.save_freq": int(gain * 1000), "trainer.default_local_dir": str(folder)}
    run = {"state": "finished", "total_steps": 30, "config": config, **about}
    (folder / "run.json").write_text(json.dumps(run))
    return folder


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "p" / "a")
    make_run(tmp_path / "p" / "b", lr=1e-4, gain=0.005)
    return tmp_path / "p"


def test_what_a_run_is(folder):
    run = open_run(folder / "a")
    assert (run.algorithm, run.model, run.steps, run.seconds, run.state) == ("grpo", "tiny", 30, 60.0, "finished")
    assert run.title == "a · grpo · tiny · lr 0.001"
    assert open_run(make_run(folder / "grpo")).title == "grpo · tiny · lr 0.001"
    assert run.validation_label("val-core/d/acc/mean@1") == "validation (greedy)"
    assert len(run.metrics["critic/score/mean"]) == 30  # without the line that was cut off
    with pytest.raises(ValueError, match=r"p is not the folder of a run .* it has the runs .*p/[ab], .*p/[ab]"):
        open_run(folder)


def test_states(tmp_path):
    import socket

    here = {"state": "running", "host": socket.gethostname()}
    alive = make_run(tmp_path / "alive", **here, pid=os.getpid(), started=time.time())
    reused = make_run(tmp_path / "reused", **here, pid=os.getpid(), started=1.0)  # a later process has the id
    gone = make_run(tmp_path / "gone", **here, pid=2**22 + 1, started=time.time())
    far = make_run(tmp_path / "far", state="running", host="elsewhere", pid=1, started=1.0)
    assert [open_run(path).state for path in (alive, reused, gone, far)] == ["running", "killed", "killed", "running"]


def test_labels_are_what_differs(folder, tmp_path):
    runs = [open_run(folder / name) for name in "ab"]
    assert differing_settings(runs) == {
        "actor_rollout_ref.actor.optim.lr": [1e-3, 1e-4],
        "trainer.save_freq": [10, 5],
    }
    assert labels(runs) == ["lr=0.001", "lr=0.0001"]
    twin = open_run(make_run(tmp_path / "p2" / "a"))
    assert labels([runs[0], twin]) == ["p/a", "p2/a"]  # nothing differs: the names that tell them apart


def test_settings_that_follow_from_others_are_not_compared(tmp_path):
    long, lr = "/models/" + "x" * 150, "actor_rollout_ref.actor.optim.lr"
    folders = []
    for name, rate in (("a", 1e-3), ("b", 1e-4)):
        folders.append(make_run(tmp_path / ("p" * 60) / name, lr=rate))
        about = json.loads((folders[-1] / "run.json").read_text())
        about["config"] |= {"critic.optim.lr": rate, "trainer.rollout_data_dir": f"{long}/{name}"}
        about["changed"] = {key: {} for key in ("algorithm.name", "trainer.rollout_data_dir", *([lr] * (name == "b")))}
        (folders[-1] / "run.json").write_text(json.dumps(about))
    assert list(differing_settings([open_run(path) for path in folders])) == ["trainer.rollout_data_dir", lr]
    done = CliRunner().invoke(app, ["runs", "compare", *map(str, folders), "--out", str(tmp_path / "c.png")])
    tables = done.stdout.partition("legend: ")[0].splitlines()
    assert done.exit_code == 0 and max(map(len, tables)) <= 120
    assert [line.split() for line in tables if line.startswith(lr)] == [[lr, "0.001", "0.0001"]]
    assert "critic.optim.lr" not in done.stdout


@pytest.mark.slow
def test_one_picture_of_two_runs(folder, tmp_path):
    runs = [open_run(folder / name) for name in "ab"]
    picture = imread(save_comparison(runs, tmp_path / "out" / "both.png"))
    single = imread(save_comparison(runs, tmp_path / "one.png", ["actor/ref_kl"]))
    assert picture.shape[1] == pytest.approx(2 * single.shape[1], abs=2)  # score and KL
    colors = {tuple(pixel) for pixel in (picture[..., :3] * 255).round().astype(int).reshape(-1, 3)}
    assert {(31, 119, 180), (255, 127, 14)} <= colors  # a color of each run


def test_the_commands(folder, tmp_path):
    listed = CliRunner().invoke(app, ["runs", "list", str(folder)])
    assert listed.exit_code == 0
    line = next(line for line in listed.stdout.splitlines() if line.startswith("a "))
    assert line.split()[:8] == ["a", "grpo", "tiny", "30/30", "0.5", "0.5", "0.3", "0.4"]
    out = tmp_path / "c.png"
    compared = CliRunner().invoke(app, ["runs", "compare", str(folder / "a"), str(folder / "b"), "--out", str(out)])
    assert compared.exit_code == 0 and out.stat().st_size > 10_000
    rows = {line.split()[0]: line.split()[1:] for line in compared.stdout.splitlines() if line.strip()}
    assert rows["actor_rollout_ref.actor.optim.lr"] == ["0.001", "0.0001"]
    assert rows["critic/score/mean"] == ["0.21", "->", "0.5", "(0.5)", "0.205", "->", "0.35", "(0.35)"]
    assert rows["val-core/d/acc/mean@1"][:4] == ["0.2", "->", "0.3", "(0.4)"]
    assert rows["actor/ref_kl"][:3] == ["0.001", "->", "0.03"] and rows["steps"] == ["30", "30"]
    for arguments, message in (
        (["compare", str(folder / "a")], "two or more runs"),
        (["compare", str(folder / "a"), str(tmp_path)], "is not the folder of a run"),
        (["compare", str(folder / "a"), str(folder / "b"), "--metric", "no"], "has no 'no'"),
        (["list", str(tmp_path / "none")], "no runs in"),
    ):
        failed = CliRunner().invoke(app, ["runs", *arguments])
        assert failed.exit_code == 1 and message in failed.output


def test_a_loss_is_no_reward(folder):
    """With runs of SFT beside others, the list has a column for their loss."""
    sft = make_run(folder / "sft")
    (sft / "metrics.jsonl").write_text('{"step": 1, "time": 0.0, "train/loss": 2.5}\n')
    head, *lines = CliRunner().invoke(app, ["runs", "list", str(folder)]).stdout.splitlines()
    assert head.split() == [
        "run",
        "algorithm",
        "model",
        "steps",
        "reward",
        "best",
        "loss",
        "validation",
        "best",
        "state",
        "age",
    ]
    rows = {line.split()[0]: line.split()[4:9] for line in lines}
    assert rows["sft"] == ["-", "-", "2.5", "-", "-"] and rows["a"] == ["0.5", "0.5", "-", "0.3", "0.4"]


def test_only_the_newest_runs_are_read(folder):
    for number in range(60):
        make_run(folder / f"r{number:02d}", started=time.time())
        os.utime(folder / f"r{number:02d}" / "metrics.jsonl", (number, number))
        os.utime(folder / f"r{number:02d}" / "run.json", (number, number))
    (folder / "r03" / "metrics.jsonl").write_bytes(b"\xff")
    shown = CliRunner().invoke(app, ["runs", "list", str(folder), "--limit", "4"]).output.splitlines()
    assert [line.split()[0] for line in shown[1:5]] in (["r03", "b", "a", "r59"], ["r03", "a", "b", "r59"])
    assert shown[5:] == [f"58 older runs in {folder}: --limit 0 lists all"]
    everything = CliRunner().invoke(app, ["runs", "list", str(folder), "--limit", "0"]).output.splitlines()
    assert len(everything) == 63 and everything[-1].startswith("r00 ")


def test_runs_are_found_newest_first(folder):
    os.utime(folder / "a" / "metrics.jsonl", (1, 1))
    os.utime(folder / "a" / "run.json", (1, 1))
    (folder / "b" / "global_step_1").mkdir()
    (folder / "b" / "global_step_1" / "metrics.jsonl").touch()  # not a run
    assert [path.name for path in run_folders(folder.parent)] == ["b", "a"]


@pytest.mark.parametrize(
    "text", ['{"a":', "[]", "null", "", b"\xff\xfe", '{"state": "running", "config": null, "changed": [1]}']
)
def test_a_damaged_run_json_hides_no_run(folder, tmp_path, text, caplog):
    (folder / "b" / "run.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    listed = CliRunner().invoke(app, ["runs", "list", str(folder)])
    assert listed.exit_code == 0, listed.output
    assert {line.split()[0] for line in listed.output.splitlines()[1:]} == {"a", "b"}
    report = CliRunner().invoke(app, ["report", str(folder / "b"), "--out", str(tmp_path / "r.html")])
    assert report.exit_code == 0 and (tmp_path / "r.html").stat().st_size > 10_000
    if "running" not in str(text):
        assert f"{folder / 'b' / 'run.json'} cannot be read" in caplog.text


def test_run_json_with_other_types_and_without_a_process(tmp_path):
    import socket

    about = {"state": "running", "host": socket.gethostname(), "config": {"model.path": 7, "algorithm.name": 3}}
    run = make_run(tmp_path / "a")
    (run / "run.json").write_text(json.dumps(about))
    found = open_run(run)
    assert (found.state, found.model, found.algorithm) == ("running", "7", "3")


def test_lines_that_are_no_metrics_are_skipped(tmp_path):
    lines = [
        '{"critic/score/mean": 9.0}',
        '{"step": "7", "critic/score/mean": 9.0}',
        '{"step": 1, "critic/score/mean": NaN, "name": "x"}',
        '{"step": 2, "critic/score/mean": 0.5, "actor/kl": Infinity}',
        "[" * 100_000,
        f'{{"step": 3, "a": {"9" * 400}, "b": 0.5}}',  # no finite float
        '{"step": 4, "a": -Infinity, "b": 1e308}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    steps = [
        '{"samples": []}',
        '{"step": 1}',
        '{"step": 2, "samples": [{"score": NaN, "output": "a"}, {"score": 0.25, "output": "b"}]}',
    ]
    (tmp_path / "steps.jsonl").write_text("\n".join(steps))
    (tmp_path / "samples.jsonl").write_text('{"name": "val/generations"}\n')
    assert open_run(tmp_path).metrics == {"critic/score/mean": [(2, 0.5)], "b": [(3, 0.5), (4, 1e308)]}
    data = report_data(open_run(tmp_path))
    assert [record["step"] for record in data["steps"]] == [2]
    assert data["extremes"] == {"best": [(2, 1)], "worst": [(2, 1)]} and data["validation"] == []
    assert write_report(tmp_path).is_file()


def test_hours_of_gpus(folder):
    """The steps of run a took 1.5 hours on 2 nodes of 4 GPUs."""
    about = json.loads((folder / "a" / "run.json").read_text())
    about["config"] |= {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4}
    (folder / "a" / "run.json").write_text(json.dumps(about))
    with (folder / "a" / "metrics.jsonl").open("a") as file:
        used = 5400 - open_run(folder / "a").seconds
        file.write("\n" + json.dumps({"step": 99, "timing_s/step": used, "perf/max_memory_allocated_gb": 1.0}) + "\n")
    tiles = {name: note for name, _, note in report_data(open_run(folder / "a"))["tiles"]}
    assert tiles["time"] == "steps and validations; 12 GPU hours"


def test_outputs_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    for words in (
        ["report", str(folder / "a"), "--out", str(tmp_path)],
        ["report", str(folder / "a"), "--out", str(tmp_path / "file" / "x.html")],
        ["examples", "copy", "quickstart", str(tmp_path / "file")],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1 and isinstance(result.exception, SystemExit), words
        assert result.output.startswith("error: ") and str(tmp_path) in result.output


def test_no_name_of_a_run_controls_the_terminal_or_is_markup(tmp_path):
    folders = [tmp_path / "p" / name for name in ("a \x1b[2J [bold]x $y", "b")]
    for folder in folders:
        make_run(folder)
        about = json.loads((folder / "run.json").read_text())
        about["config"] |= {"algorithm.name": f"[/b]{HOSTILE}", "x" + HOSTILE: HOSTILE + folder.name}
        (folder / "run.json").write_text(json.dumps(about | {"experiment": HOSTILE}))
    for words in (["list", str(tmp_path / "p")], ["compare", *map(str, folders), "--out", str(tmp_path / "c.png")]):
        done = CliRunner().invoke(app, ["runs", *words])
        assert done.exit_code == 0 and not CODES.findall(done.output), done
        assert r"\x1b[2J [bold]x $y" in done.output and "[/b]" in done.output


def test_an_outlier_does_not_lift_the_smooth_curve(folder):
    """100 at step 15 of a curve that rises from 0.21 to 0.5: the limits keep it out, and the mean of its neighbors is
    that of values within them."""
    path = folder / "a" / "metrics.jsonl"
    path.write_text(path.read_text().replace(f'"critic/score/mean": {0.2 + 0.01 * 15}', '"critic/score/mean": 100'))
    (score,) = [panel for panel in report_data(open_run(folder / "a"))["panels"] if panel["title"] == "score"]
    assert max(value for _, value in score["curves"][0]["points"]) == 100
    assert min(score["curves"][0]["smooth"]) > 0.2 and max(score["curves"][0]["smooth"]) < 0.6


def test_a_metric_is_described_without_references_to_pages():
    assert describe("rollout/logprob_gap_mean").startswith(
        "Absolute difference between the log-probs of rollout and training, per token. A mean below 0.01;"
    )
