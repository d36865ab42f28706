"""mkdocs.yml lists every page, the guide is short, and links, objects, keys and messages lead to what exists."""

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.pages import blocks
from verl.cli.config import SCHEMAS
from verl.config.fields import fields_of

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
HOME = {"index.md": ROOT / "README.md", "index.zh.md": ROOT / "README.zh.md"}
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
#: pages of the guide that show keys of other projects, of older releases or of the reader; their own tests load them
OTHER_KEYS = {"configuration.md", "sft.md", "custom_reward.md", "migrate_from_verl.md", "migrate_from_trl.md"}
FILES = (".safetensors", ".py", ".md", ".jsonl", ".json", ".parquet", ".csv")
KEY = re.compile(r"(?<![\w./])(?:actor_rollout_ref|data|algorithm|trainer|reward|critic)(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)")
OBJECT = re.compile(r"^<!-- api (\S+)((?: \w+)*) -->$", re.MULTILINE)


def entries(nav: Any) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    children = nav.values() if isinstance(nav, dict) else nav
    return [page for child in children for page in entries(child)]


def test_every_page_is_in_the_navigation_once():
    assert sorted(entries(NAV)) == sorted([*HOME, *(path.relative_to(DOCS).as_posix() for path in PAGES)])


GUIDE = [HOME.get(page, DOCS / page) for page in entries(NAV[0]["Guide"])]


def test_the_guide_has_at_most_25_000_words_and_a_home_page_150_lines():
    words = {page.name: len(page.read_text().split()) for page in GUIDE if page != HOME["index.zh.md"]}
    assert sum(words.values()) <= 25_000, words
    assert all(len(page.read_text().splitlines()) <= 150 for page in HOME.values())


@pytest.mark.parametrize("page", GUIDE, ids=lambda path: path.name)
def test_a_page_of_the_guide_has_a_table_or_a_picture_and_names_no_test(page):
    text = page.read_text()
    assert re.search(r"^\|[-|: ]+\|$|^<picture>|^```mermaid", text, re.MULTILINE)
    assert re.search(r"\btests/|\btest_\w+\.py", text) is None


def test_only_internals_name_tests_in_their_introduction():
    introductions = {path: path.read_text().split("\n## ")[0] for path in PAGES if path.parent == DOCS}
    assert [path.name for path, text in introductions.items() if re.search(r"\btests/\w", text)] == []


@pytest.mark.parametrize("page", [page for page in GUIDE if page.name not in OTHER_KEYS], ids=lambda path: path.name)
def test_every_key_in_a_page_of_the_guide_exists(page):
    for key in {key for key in KEY.findall(page.read_text()) if not key.endswith(FILES)}:
        assert any(is_known(key, schema) for schema in SCHEMAS.values()), key


def is_known(key: str, schema: Any) -> bool:
    """Whether a schema has a key, also as a section, as an alias, or as an entry of a mapping."""
    known, key = fields_of(schema), schema.aliases.resolve(key)
    above = key.rpartition(".")[0]
    return (
        key in known
        or any(name.startswith(f"{key}.") for name in known)
        or (above in known and known[above].is_mapping)
    )


@pytest.mark.parametrize("page", [*HOME.values(), *PAGES], ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_to_a_file(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    targets = [target for target in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
    targets += re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_message_of_the_troubleshooting_page_is_in_the_code():
    """The parts between placeholders, of which "of" and "step" are everywhere. In the code: %s, %.1f, %r."""
    quoted = [line for block in blocks("troubleshooting.md", "output") for line in block.splitlines()]
    parts = {part for line in quoted for part in map(str.strip, line.split("...")) if len(part) > 5}
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "verl").rglob("*.py") if "examples" not in path.parts]
    joined = [re.sub(r'"\s*\n\s*[rf]{0,2}"', "", text) for text in texts]  # as the parser joins adjacent strings
    rare = {part for part in parts if sum(part in text for text in joined) < 10}
    trees = [ast.parse(text) for text, whole in zip(texts, joined) if any(part in whole for part in rare)]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    code = "\n".join(re.sub(r"%[-+.\d]*[sdgrf]", "\0", node.value) for node in nodes if isinstance(node.value, str))
    assert len(quoted) >= 25 and [part for part in parts if part not in code] == []


def test_the_architecture_is_that_of_the_tree():
    """Files, folders and decorators that the page names exist, and it names every package."""
    text = (DOCS / "internals" / "architecture.md").read_text()
    assert len(text.splitlines()) <= 250
    named = set(re.findall(r"`([\w./]+(?:\.py|\.yaml|/))`", text)) - {"recipe/NAME/"}
    verl = ROOT / "verl"
    places = (ROOT, verl, *verl.iterdir())
    assert [path for path in named if not any((place / path).exists() for place in places)] == []
    packages = {f"{path.parent.name}/" for path in verl.glob("*/__init__.py")}
    assert packages <= named | {"examples/"}
    code = "\n".join(path.read_text() for path in verl.rglob("*.py"))
    assert all(re.search(rf"^def {name}\(", code, re.MULTILINE) for name in re.findall(r"`@(\w+)", text))


def test_every_object_of_the_api_reference_exists():
    found = [each for page in sorted((DOCS / "api").glob("*.md")) for each in OBJECT.findall(page.read_text())]
    assert len(found) >= 35
    for path, methods in found:
        module, _, name = path.rpartition(".")
        named = getattr(importlib.import_module(module), name)
        assert named.__doc__, path
        for method in methods.split():
            assert callable(getattr(named, method)), f"{path}.{method}"
