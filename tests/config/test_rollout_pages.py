"""The pages on rollout, weight sync, asynchronous training, tools and agents: every key is in the schema."""

import re
import shlex

import pytest

from tests.pages import DOCS, ROOT, blocks
from verl.config import load_config, to_flat_dict
from verl.config.presets import PRESETS

PAGES = ("rollout.md", "weight_sync.md", "async.md", "multi_turn.md", "server.md")
PREFIXES = ("", "actor_rollout_ref.", "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.multi_turn.")


def main_ppo(page: str) -> list[list[str]]:
    """The arguments of every main_ppo command of a page; `...` stands for further settings."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if "-m verl.trainer.main_ppo" in line]
    return [[word for word in words[3:] if word != "..."] for words in found]


@pytest.mark.parametrize("page", PAGES)
def test_commands(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in main_ppo(page):
        path = words[words.index("--config") + 1] if "--config" in words else None
        load_config(path, [word for word in words if "=" in word], presets=PRESETS)


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_tables(page):
    known = to_flat_dict(load_config())
    text = (DOCS / page).read_text()
    tables = re.findall(r"^\|[^\n]*\|\n\|[-|]+\|\n(?:\|.*\n)+", text, re.MULTILINE)
    for table in tables:
        head, _, *rows = table.splitlines()
        if not re.match(r"\| (key|`actor_rollout_ref\.rollout\.`) \|", head):
            continue
        for row in rows:
            cell, default = row.split("|")[1:3]
            keys = re.findall(r"`([^`=]+)`", cell)
            assert keys, row
            for key in keys:
                full = next((prefix + key for prefix in PREFIXES if prefix + key in known), None)
                section = any(prefix + key + "." in name for prefix in PREFIXES for name in known)
                assert full is not None or section, f"{page}: {key}"
                if "default" in head and len(keys) == 1 and (value := default.strip(" `")):
                    assert str(known[full]).lower().replace("none", "null").removesuffix(".0") == value, (
                        f"{page}: {key}"
                    )
