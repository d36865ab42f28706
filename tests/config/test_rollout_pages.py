"""The pages on rollout, weight sync, asynchronous training, tools and agents: every key is in the schema."""

import json
import re
import shlex

import pytest
from transformers import AutoTokenizer

from examples.quickstart.tiny_model import tiny_model
from tests.pages import DOCS, ROOT, blocks
from verl.agents import Prompt, make_agent_loop
from verl.config import load_config, to_flat_dict
from verl.data.tokenization import check_messages
from verl.rollout.request import SamplingParams

PAGES = ("rollout.md", "internals/weight_sync.md", "async.md", "multi_turn.md", "server.md", "custom_agent_loop.md")
PREFIXES = ("", "actor_rollout_ref.", "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.multi_turn.")


def main_ppo(page: str) -> list[list[str]]:
    """The arguments of every main_ppo command of a page."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if "verl train " in line]
    return [words[words.index("train") + 1 :] for words in found]


@pytest.mark.parametrize("page", PAGES)
def test_commands(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in main_ppo(page):
        assert "..." not in words, f"{page}: incomplete: {words}"
        path = words[words.index("--config") + 1] if "--config" in words else None
        load_config(path, [word for word in words if "=" in word])


def test_rows_of_datasets(tmp_path):
    """The rows with arguments of tools and interactions are read as the agent loop reads them."""
    rows = [row for block in blocks("multi_turn.md", "json") if "prompt" in (row := json.loads(block))]
    for row in rows:
        assert {"data_source", "prompt", "reward_model", "extra_info"} == row.keys()
        check_messages(row["prompt"], "the row of the page")
    folder, turns = ROOT / "examples/tools", "actor_rollout_ref.rollout.multi_turn."
    files = {
        "tool_config_path": folder / "search_tool.yaml",
        "interaction_config_path": folder / "guess_interaction.yaml",
    }
    overrides = [f"{turns}{key}={path}" for key, path in files.items()]
    config = load_config(overrides=[f"{turns}enable=true", f"{turns}tool_isolation=none", *overrides])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model("qwen2", tmp_path))
    loop = make_agent_loop("tool_agent", config.actor_rollout_ref.rollout, tokenizer)
    tools, interaction = (loop._state_of(Prompt([1], SamplingParams(1, ()), 0, row)) for row in rows)
    assert tools.tools_kwargs["search"]["calc_reward_kwargs"] == {"weight": 0.5} and not loop._unknown
    assert interaction.interaction == "guess" and interaction.interaction_kwargs["secret"] == 3


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
