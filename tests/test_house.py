"""scripts/house.py on small graphs, and the figures of this repository that are laws."""

import re
import tomllib
from pathlib import Path

from scripts.house import ENTRY, components, files_of, import_graph, longest_chain, sizes, small_modules, spread

ROOT = Path(__file__).parents[1]


def test_no_import_cycle_and_no_long_chain():
    graph = import_graph(ROOT)
    assert [group for group in components(graph) if len(group) > 1] == []
    assert len(longest_chain(graph, ENTRY)) - 1 <= 16  # nine from the flow to the registry


def test_the_size_of_the_package():
    """The law that CONTRIBUTING.md names; recipes and examples are beside the package."""
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files_of(ROOT, "verl"))
    assert lines <= 80_000
    assert small_modules(ROOT) == []


def test_cycles_and_chains():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a"}}
    assert components(graph) == [["d"], ["b", "c"], ["a"], ["e"]]
    assert longest_chain(graph, "a") == ["a", "b", "d"]


def test_imports_are_read_from_the_source(tmp_path):
    (tmp_path / "verl" / "sub").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("")
    (tmp_path / "verl" / "sub" / "__init__.py").write_text("from verl.sub.one import f\n")
    (tmp_path / "verl" / "sub" / "one.py").write_text("def f():\n    from . import two\n    return two\n")
    (tmp_path / "verl" / "sub" / "two.py").write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    import verl.sub.one\n"
    )
    graph = import_graph(tmp_path)
    assert graph["verl.sub"] == {"verl.sub.one"} and graph["verl.sub.one"] == {"verl.sub.two"}
    assert graph["verl.sub.two"] == set()
    assert import_graph(tmp_path, inside_functions=False)["verl.sub.one"] == set()
    assert sizes(tmp_path, "verl")["functions"] == 1 and spread([1, 2, 9]) == {"median": 2, "p95": 9, "max": 9}


def test_advice_to_install_names_an_extra_of_a_clone():
    """The name `verl` on package indexes is another project, and an extra that does not exist installs nothing."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    files = [
        path for folder in ("verl", "docs", "examples", "scripts", "docker") for path in (ROOT / folder).rglob("*")
    ]
    for path in (ROOT / "README.md", *files):
        if path.suffix not in (".py", ".md", ".sh", ".yaml") or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install (?:-\S+ )*[\"']?verl\b(?!-)", text), path
        named = {
            name for group in re.findall(r"pip install -e [\"']?\.\[([\w,]+)\]", text) for name in group.split(",")
        }
        assert named <= extras.keys(), path
