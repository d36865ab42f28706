"""docs/internals/performance.md: its tables are the recorded numbers, its settings exist, its commands run."""

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
