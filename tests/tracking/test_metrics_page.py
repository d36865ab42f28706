"""docs/metrics.md: its tables are those of metric_names.yaml, and every name in it exists in the code.

The fixture `logged_metrics_are_listed` (tests/conftest.py) checks the reverse for every run in tests/trainer and
tests/recipe: PPO, GRPO, asynchronous and multi-turn runs, dynamic sampling, DPO and PRIME.
"""

import re
from functools import cache
from pathlib import Path

from scripts.metrics_page import PAGE, text
from verl.tracking.report.report import describe, find, metrics

ROOT = Path(__file__).resolve().parents[2]
CLOSED = [pattern for metric in metrics() for pattern in metric.patterns if not pattern.endswith("/*")]


@cache
def words() -> set[str]:
    """The parts between slashes of every string in the code without spaces, parts of f-strings included."""
    code = "".join(path.read_text() for folder in ("verl", "recipe") for path in (ROOT / folder).rglob("*.py"))
    return {part for text in re.findall(r'"([^"\s]*)"', code) for part in re.split(r"{[^{}]*}|/", text)}


def exists(name: str) -> bool:
    """Whether the code has every part of a name, in one string or in two, as in f"staleness_{k}"."""
    return all(
        part in words() or any({part[:i], part[i:]} <= words() for i in range(1, len(part)) if part[i - 1] == "_")
        for part in name.replace("*", "").split("/")
    )


def test_the_page_is_that_of_the_list():
    assert PAGE.read_text() == text(), "run `python scripts/metrics_page.py`"


def test_every_name_exists_in_the_code():
    assert [pattern for pattern in CLOSED if not exists(pattern)] == []
    assert exists("critic/score/mean") and not exists("critic/score/medians") and not exists("actor/pg_losses")


def test_entries():
    assert find("val-core/gsm8k/acc/mean@8").section == "Validation" and find("no/such") is None
    assert find("reward/acc").names == "reward/*" and find("reward/tied_groups").unit == "share"
    assert "`" not in describe("rollout/logprob_gap_mean") and "](" not in describe("rollout/logprob_gap_mean")
    assert all(metric.meaning.endswith((".", ")")) for metric in metrics())
    names = [metric.names for metric in metrics()]
    assert len(set(names)) == len(names)
    # an open entry comes after those that it would hide
    for i, metric in enumerate(metrics()):
        assert not any(metric.matches(p) for later in metrics()[i + 1 :] for p in later.patterns), metric.names
    assert re.search(r"^\| `critic/score/{mean,max,min}` \| reward \|", PAGE.read_text(), re.M)
