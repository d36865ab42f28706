"""scripts/mutants.py: the faults of a source, and a test suite that finds one of two faults."""

from pathlib import Path

from scripts import mutants
from scripts.faults import mutants_of

ROOT = Path(__file__).parents[1]

SOURCE = '''"""A docstring: 1 + 1."""
LIMIT: int = 3

def mean(x: list[int], dim=0):
    """Not 1 + 1 either."""
    logger.info("x %d", 1 + 1)
    if not x or dim > 1:
        raise ValueError(f"{len(x) + 1} values, " + "expected more")
    return sum(x, start=dim) / len(x)
'''


def test_the_faults_of_a_source():
    found = [
        (m.line, m.function, m.fault, m.source(SOURCE).splitlines()[m.line - 1].strip())
        for m in mutants_of("a.py", SOURCE)
    ]
    assert found[:4] == [
        (2, "", "constant", "LIMIT: int = 4"),
        (2, "", "constant", "LIMIT: int = (2)"),
        (4, "mean", "constant", "def mean(x: list[int], dim=1):"),
        (4, "mean", "constant", "def mean(x: list[int], dim=(-1)):"),
    ]
    # nothing of the docstrings, of the annotation, of the log line and of the message
    assert [(fault, line) for _, _, fault, line in found[4:]] == [
        ("condition", "if not (not x or dim > 1):"),
        ("and/or", "if (not x and dim > 1):"),
        ("sign", "if (x) or dim > 1:"),
        ("comparison", "if not x or (dim >= 1):"),
        ("comparison", "if not x or (dim <= 1):"),
        ("constant", "if not x or dim > 2:"),
        ("constant", "if not x or dim > (0):"),
        ("statement", "pass"),
        ("return", "return None"),
        ("operator", "return (sum(x, start=dim) * len(x))"),
        ("argument", "return (sum(x)) / len(x)"),
        ("function", "return mean(x, start=dim) / len(x)"),
    ]


def test_places_in_a_file():
    """In the second of two lines, after characters of several bytes, and in nested functions."""
    text = "def f(a):\n    def g():\n        return 'ä', (a +\n            1)\n    return g\n"
    found = {(m.function, m.source(text)) for m in mutants_of("a.py", text) if m.fault == "operator"}
    assert found == {("f.<locals>.g", text.replace("a +\n            1", "(a - 1)"))}


def test_a_seed_draws_the_same_faults():
    first = mutants.draw(5, 1, ["verl/algorithms/kl.py"])
    assert first == mutants.draw(5, 1, ["verl/algorithms/kl.py"]) != mutants.draw(5, 2, ["verl/algorithms/kl.py"])
    assert {mutant.path for mutant in first} == {"verl/algorithms/kl.py"}
    source = (ROOT / "verl/algorithms/kl.py").read_text()
    # every one is another program
    trees = {mutants.tree_of(m.source(source)) for m in mutants.draw(40, 1, ["verl/algorithms/kl.py"])}
    assert len(trees) == 40 and mutants.tree_of(source) not in trees


def test_a_fault_outside_functions_is_judged_by_all_tests_of_the_file():
    """Not only by those during which the module was imported: most modules are imported before the first test."""
    reads, imports = "tests/data/test_a.py::test_reads", "tests/data/test_a.py::test_imports"
    calls = mutants.Calls([])
    calls.tests = {"a.py": {reads, imports}, "a.py::": {imports}, "a.py::mean": {reads}}
    calls.seconds = {reads: 2.0, imports: 1.0}
    outside, inside = (next(m for m in mutants_of("a.py", SOURCE) if m.function == name) for name in ("", "mean"))
    assert calls.of(outside, 100.0, set()) == [imports, reads]
    assert calls.of(inside, 100.0, set()) == [reads]


def test_what_is_listed_exists():
    assert len(mutants.sources([])) > 80 and len(mutants.test_files()) > 80
    assert all((ROOT / name).exists() for name in mutants.SOURCES)
