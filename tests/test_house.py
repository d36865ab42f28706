"""scripts/house.py on small graphs, and two figures of this repository that are laws."""

from pathlib import Path

from scripts.house import ENTRY, components, import_graph, longest_chain, sizes, spread

ROOT = Path(__file__).parents[1]


def test_no_import_cycle_and_no_long_chain():
    graph = import_graph(ROOT)
    assert [group for group in components(graph) if len(group) > 1] == []
    assert len(longest_chain(graph, ENTRY)) - 1 <= 16  # nine from the flow to the registry


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
