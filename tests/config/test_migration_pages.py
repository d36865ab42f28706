"""docs/migrate_from_*.md: every setting on the pages loads, and TRL's names lead to the keys of the page."""

import re
import shlex

import pytest

from tests.pages import DOCS, table_rows
from verl.config import ConfigError, load_config, to_flat_dict
from verl.config.fields import fields_of
from verl.config.public import trl as trl_names
from verl.config.schema import Config, SFTConfig
from verl.trainer.startup.command_line import split_arguments

VERL, TRL = ((DOCS / f"migrate_from_{name}.md").read_text() for name in ("verl", "trl"))


def codes(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_command_of_the_trl_page_is_valid():
    (command,) = re.findall(r"```bash\n(.*?)```", TRL, re.DOTALL)
    program, name, *arguments = shlex.split(command.replace("\\\n", " "))
    assert (program, name) == ("verl", "train")
    path, overrides, _ = split_arguments(arguments)
    assert load_config(path, overrides).actor_rollout_ref.rollout.n == 8


TABLES = {"GRPOConfig": (Config, trl_names.RL), "SFTConfig": (SFTConfig, trl_names.SFT)}


@pytest.mark.parametrize("title", TABLES)
def test_every_setting_of_the_trl_page_loads_alone(title):
    schema, _ = TABLES[title]
    for row in table_rows(TRL, title):
        (setting,) = codes(row[1])
        load_config(overrides=[setting], schema=schema)


@pytest.mark.parametrize("title", TABLES)
def test_names_of_trl_lead_to_the_keys_of_the_page(title):
    schema, known = TABLES[title]
    on_page = {}
    for theirs, ours, *_ in table_rows(TRL, title):
        for argument in codes(theirs):
            on_page[argument.partition("=")[0]] = codes(ours)[0].partition("=")[0]
    for name, key in on_page.items():
        if key.rpartition(".")[2] == name:
            continue  # a name that both have is completed
        assert known[name] == key or key.startswith(known[name] + "."), name
    assert set(known.values()) <= set(fields_of(schema))
    assert set(known) <= set(on_page) | {"temperature"}


@pytest.mark.parametrize("name", ["beta", "num_generations", "max_completion_length", "per_device_train_batch_size"])
@pytest.mark.parametrize("spelled", ["{}", "trainer.{}", "actor_rollout_ref.actor.{}", "+algorithm.{}"])
def test_a_name_of_trl_is_suggested_wherever_it_is_typed(name, spelled):
    with pytest.raises(ConfigError, match=rf"did you mean {re.escape(trl_names.RL[name])}\?"):
        load_config(overrides=[spelled.format(name) + "=1"])


def test_the_keys_that_change_between_verl_and_here():
    for theirs, ours, note in table_rows(VERL, "Keys that change") + table_rows(VERL, "Scripts for Megatron"):
        settings = codes(ours)
        ranks = ["trainer.n_gpus_per_node=2"] if "parallel_size" in ours else []
        for setting in settings:
            load_config(overrides=[setting, *ranks])
        if "the old name works" in note or "accepted" in note or "ignored" in note:
            given = codes(theirs)[0]
            config = load_config(overrides=[given, *ranks])
            if "the old name works" in note:
                key, _, value = settings[0].partition("=")
                assert str(to_flat_dict(config)[key]).strip("[]'") == value.strip("[]"), given
        if note.startswith("an error"):
            with pytest.raises(ConfigError, match="not support"):
                load_config(overrides=["model_engine=megatron", codes(theirs)[0]])


def test_what_the_page_calls_not_supported_is_refused():
    for row in table_rows(VERL, "Keys that change"):
        if "not supported yet" in row[2] and not row[1]:
            for setting in codes(row[0]):
                key = setting if setting.startswith(("data", "dist")) else f"actor_rollout_ref.rollout.{setting}"
                with pytest.raises(ConfigError, match="is not supported"):
                    load_config(overrides=[key])


def test_the_defaults_that_differ():
    ours = to_flat_dict(load_config())
    for key, _, here in table_rows(VERL, "Defaults that differ"):
        key = codes(key)[0]
        if key not in ("critic.model.path", "trainer.project_name", "trainer.experiment_name"):
            assert str(ours[key]).replace("'", "").lower() == here.strip("`"), key
