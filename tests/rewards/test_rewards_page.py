"""docs/rewards.md lists every rule and every data source, and its examples run."""

import doctest
import re
from pathlib import Path

from verl.rewards import REWARD_FUNCTION_REGISTRY, RULES_BY_DATA_SOURCE
from verl.rewards.resolve import rule_for

PAGE = Path(__file__).resolve().parents[2] / "docs" / "rewards.md"


def test_the_table_is_what_there_is():
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    names = [re.findall(r"`(\w+)`", row[0])[0] for row in rows]
    assert sorted(names) == sorted(REWARD_FUNCTION_REGISTRY)
    routed = {source: name for name, row in zip(names, rows) for source in re.findall(r"`([^`]+)`", row[-1])}
    assert set(routed) == set(RULES_BY_DATA_SOURCE)
    for source, name in routed.items():
        assert rule_for(source).func is REWARD_FUNCTION_REGISTRY[name]


def test_the_examples():
    failed, tried = doctest.testfile(str(PAGE), module_relative=False)
    assert failed == 0 and tried > 5
