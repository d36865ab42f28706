"""Pages on performance: tables and figures are the recorded ones, settings exist, commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from verl.config import load_config, to_flat_dict
from verl.config.public.aliases import RL

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "internals/performance.md").read_text()
RECORD = json.loads((ROOT / "benchmarks" / "results" / "train_step_gpu.json").read_text())
COMMANDS = [
    line.split("#")[0].strip() for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()
]


def words(line: dict) -> list[str]:
    return [
        f"{line['update_seconds']:.3f}",
        f"{line['reference_seconds']:.3f}",
        f"{100 * line['mfu']:.1f} %",
        f"{line['peak_gib']:.1f}",
        f"{line['first_update_seconds']:.1f}",
    ]


def test_the_table_has_the_recorded_numbers():
    for line in RECORD["updates"]:
        if line["name"] == "rl":
            rows = [row.split("|") for row in PAGE.splitlines() if row.startswith(f"| `{line['variant']}`")]
            cells = [[cell.strip() for cell in row[2:-1]] for row in rows]
            assert [str(line["samples"]), *words(line)] in cells
        else:
            assert f"{line['update_seconds']:.3f} s and {line['reference_seconds']:.3f} s" in PAGE
            assert f"{100 * line['mfu']:.1f} % MFU" in PAGE


def test_where_the_time_goes_is_what_was_recorded():
    found = RECORD["kernel_milliseconds"]
    update, reference = found["update, 8 to a prompt"], found["reference, 8 to a prompt"]
    names = {"GEMMs": "products", "SwiGLU": "SwiGLU", "sums and norms": "sums and norms"}
    names |= {name: name for name in ("attention", "rotary embedding", "idle")}
    for name, recorded in names.items():
        assert f"| {name} | {update[recorded]:.0f} | {reference[recorded]:.0f} |" in PAGE
    for part in list(RECORD["without_one_part"].values())[1:]:
        assert f"| {part['update_seconds']:.3f} | {part['reference_seconds']:.3f} |" in PAGE


def test_every_setting_of_the_page_is_a_key_with_that_default():
    flat = to_flat_dict(load_config())
    rows = re.findall(r"^\| `((?:actor|model)\.[\w.]+)`(?: \(`([\w.]+)`\))? \| (\w+) \|", PAGE, re.M)
    assert len(rows) == 4
    for name, second, default in rows:
        assert json.dumps(flat[f"actor_rollout_ref.{name}"]).strip('"') == default
        assert not second or RL.deprecated[f"actor_rollout_ref.{second}"] == f"actor_rollout_ref.{name}"


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--suite cpu" in c])
@pytest.mark.slow
def test_commands_for_any_machine(command):
    arguments = shlex.split(command)[1:]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments, "--threads", "1"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert any(line.get("update_seconds", line.get("update_actor_seconds", 0)) > 0 for line in lines)


def test_the_table_of_engines_has_the_recorded_numbers():
    record = json.loads((ROOT / "benchmarks" / "results" / "engines_h200.json").read_text())["lines"]
    rows = [
        row.split("|")
        for row in PAGE.split("## Engines side by side")[1].splitlines()
        if row.startswith("|") and ("`native`" in row or "`vllm`" in row)
    ]
    assert len(rows) == 20
    for row in rows:
        cells = [cell.strip() for cell in row[2:-1]]
        found = [
            line
            for line in record
            if f"{line.get('step_s', 0):.2f}" == cells[2]
            and ("fsdp2" if cells[0].startswith("FSDP2") else "megatron") == line.get("strategy")
        ]
        assert len(found) == 1, cells
        line = found[0]
        assert cells[1].startswith(f"`{line['engine']}`")
        numbers = [f"{line['gen_s']:.2f}", f"{line['update_s']:.2f}", f"{100 * line['mfu']:.0f} %"]
        numbers += [
            f"{line['push_s']:.3f}".replace("0.000", "0"),
            f"{line['memory_gib']:.0f}",
            f"{line['mismatch']:.2g}",
        ]
        assert cells[3:] == numbers


# ---- docs/performance.md --------------------------------------------------------------------------------------------

READER = (ROOT / "docs" / "performance.md").read_text()
FIGURES = (("step_s", "seconds"), ("gen_s", "gen_seconds"), ("update_s", "update_actor_seconds"))
FIGURES += (("memory_gib", "peak_gib"),)


def is_rounded(text: str, value: float) -> bool:
    """Whether a printed number is the value, rounded to its decimals."""
    return abs(float(text) - value) <= 0.5001 * 10 ** -len(text.partition(".")[2])


def test_each_step_time_is_one_line_of_its_record():
    rows = [row for row in READER.splitlines() if row.startswith("|") and "[" in row and row.count("|") == 9]
    assert len(rows) == 13
    for row in rows:
        *_, link = cells = [cell.strip() for cell in row.split("|")[1:-1]]
        record = json.loads((ROOT / "docs" / re.search(r"\((.*)\)", link)[1]).resolve().read_text())
        lines = record.get("lines") or record["results"]
        values = [[line.get(a, line.get(b)) for a, b in FIGURES] for line in lines]
        assert [v for v in values if None not in v and all(map(is_rounded, cells[3:7], v))], row
        assert cells[1][2:] in record["device"] or record["device"] == "cpu, 2 threads", row


@pytest.mark.parametrize(
    ("name", "path", "value", "text"),
    [
        ("grpo_step_gpu", ("lines", 3, "faster"), 1, "3.85 times"),
        ("grpo_step_gpu", ("lines", 5, "faster"), 1, "4.53 times"),
        ("grpo_step_gpu", ("lines", 0, "start_to_end_of_first_step_seconds"), 1, "15.4 s"),
        ("grpo_step_cpu_2_threads", ("lines", 2, "faster"), 1, "1.87 times"),
        ("async_step_h200", ("lines", 2, "faster_than_colocated"), 1, "1.77 times"),
        ("fp8", ("lines", 1, "tokens_per_second"), 8813, "1.47 times"),
        ("fp8", ("lines", 5, "tokens_per_second"), 21686, "1.29 at 256"),
        ("fp8", ("lines", 4, "tokens_per_second"), 1, "21686 tokens/s"),
        ("fp8", ("lines", 5, "tokens_per_second"), 1, "27908 with FP8"),
        ("fp8", ("lines", 2, "tokens_per_second"), 1, "5443 instead"),
        ("fp8", ("lines", 10, "update_seconds"), 0.6953, "1.14 times"),
        ("fp8", ("lines", 12, "update_seconds"), 1, "0.98 s"),
        ("fp8", ("lines", 10, "update_seconds"), 1, "0.79 s"),
        ("train_step_gpu", ("updates", 0, "mfu"), 0.01, "44 %"),
        ("engines_h200", ("lines", 16, "mfu"), 0.01, "57 %"),
    ],
)
def test_figures_in_the_text_are_recorded(name, path, value, text):
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    for key in path:
        found = found[key]
    assert text in READER.replace(",", "")
    assert is_rounded(text.split()[0], found / value)


def test_the_table_of_the_tool_agent_is_its_record():
    page = (ROOT / "docs/multi_turn.md").read_text()
    for run in json.loads((ROOT / "benchmarks/results/tool_agent_cpu.json").read_text())["runs"]:
        name = "shuffled rewards" if run["shuffled_rewards"] else "GRPO"
        cells = [f"{value:.3f}" for _, value in run["val-core/data/acc/mean@1"]] + [f"{run['processor_seconds']:.0f}"]
        assert f"| {name}, seed {run['seed']} | {' | '.join(cells)} |" in page


def test_the_page_for_readers_is_short_and_names_existing_keys():
    assert len(READER.split()) <= 2500
    keys = [key.split(".") for key in to_flat_dict(load_config())]
    for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)*)(?:=[^`]*)?`", READER.split("## What to set")[1]):
        if "_" in name and "/" not in name and name not in ("old_log_prob", "update_actor", "sync_weights"):
            assert any(key[-len(name.split(".")) :] == name.split(".") for key in keys), name
