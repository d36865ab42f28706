"""docs/algorithms.md has every preset, recipe, loss and aggregation, and names none that does not exist."""

import re
from pathlib import Path

from benchmarks.learning import read_runs
from benchmarks.learning_page import CURVES, RESULTS, page, pictures
from benchmarks.learning_page import PAGE as CURVES_PAGE
from benchmarks.learning_pool import read_plan
from tests.pages import table_rows
from verl.algorithms.masked import LOSS_AGG_MODES
from verl.algorithms.policy_losses import POLICY_LOSS_REGISTRY
from verl.config.fields import fields_of
from verl.config.presets import PRESETS
from verl.config.schema.ppo import Config

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "algorithms.md").read_text()


def named(title: str) -> dict[str, list[str]]:
    return {re.match(r"`(\w+)`", cells[0])[1]: cells for cells in table_rows(PAGE, title)}


def test_every_preset_has_its_line_and_its_paper():
    tables = named("Advantage estimators") | named("Policy losses")
    assert set(tables) == set(PRESETS)
    for name, cells in tables.items():
        assert re.search(r"arxiv\.org/abs/\d{4}\.\d{5}", cells[3]) or "optimal_token_baseline" in name
        assert len(cells) == 5 and cells[1] and cells[2], name
        assert cells[4] in (f"[curve](curves/reverse-{name}.png)", "not recorded"), name
        assert (CURVES / f"reverse-{name}.png").is_file() == (cells[4] != "not recorded"), name


def test_every_recipe_has_its_line():
    folders = {re.search(r"\((.*?)\)", cells[0])[1] for cells in table_rows(PAGE, "Recipes")}
    recipes = {path.parent.name for path in ROOT.glob("verl/recipe/*/*.yaml")}
    assert folders == {f"../verl/recipe/{name}" for name in recipes}
    for name in recipes:  # and shows its curve
        folder = ROOT / "verl" / "recipe" / name
        pictures_of_it = re.findall(r"!\[.*?\]\((.*?)\)", (folder / "README.md").read_text())
        assert pictures_of_it and all((folder / picture).is_file() for picture in pictures_of_it)


def test_the_figures_are_those_of_the_recorded_runs():
    """`python benchmarks/learning_page.py` would change nothing."""
    runs = read_runs(RESULTS)
    text = CURVES_PAGE.read_text()
    assert page(text, runs) == text
    assert set(pictures(runs)) == {path.name for path in CURVES.iterdir()}


def test_the_plan_is_what_was_run():
    planned = {job.curve.key for job in read_plan((ROOT / "benchmarks" / "learning_plan.txt").read_text())}
    tables = named("Advantage estimators") | named("Policy losses")
    unrecorded = {name for name, cells in tables.items() if cells[4] == "not recorded"}
    assert {key for key in planned if key[1] not in unrecorded} == {run.key for run in read_runs(RESULTS)}


def test_every_loss_and_aggregation_is_named():
    words = set(re.findall(r"`([\w+-]+)`", PAGE))
    assert set(POLICY_LOSS_REGISTRY) <= words
    assert set(LOSS_AGG_MODES) <= words


def test_the_keys_are_there():
    known = list(fields_of(Config))
    for cells in table_rows(PAGE, "Options for every algorithm"):
        for key in re.findall(r"`([\w.*]+)`", cells[0]):
            name = key.replace("actor.", "actor_rollout_ref.actor.").rstrip("*")
            assert any(k.startswith(name) for k in known), key
