"""Mutation testing: puts random faults into the source, one at a time, and counts those that the tests find.

    python scripts/mutants.py --number 300 --seed 1            # 300 faults, the same ones for the same source
    python scripts/mutants.py --number 50 --only verl/algorithms    # run it again: what survived is judged again

A fault (comparison, operator, constant, condition, argument, return value, removed statement, mean for sum, dim 0 for
dim 1, ...) is written into a copy of the repository, so that processes that a test starts see it too. It is judged by
the tests that call the function in which it is, those of the test file that mirrors the source file first, then the
fastest. Which test calls which function is measured once per test file (build/mutants/map).

A process that has imported torch, transformers and pytest, but not verl, forks one child per fault.
"""

import argparse
import ast
import contextlib
import ctypes
import gc
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.faults import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "mutants"

#: what gets faults: files and folders
SOURCES = (
    "verl/algorithms",
    "verl/checkpoints",
    "verl/data",
    "verl/dataflow",
    "verl/engines",
    "verl/rollout",
    "verl/single_controller",
    "verl/trainer/base.py",
    "verl/trainer/output/metrics.py",
    "verl/trainer/ppo",
    "verl/trainer/state",
)
#: needs a GPU or packages of other environments
ELSEWHERE = ("megatron", "vllm", "sglang", "cuda_decoder", "batch_invariant_cuda", "triton")
ON_GPU = ("paged_scheduler.py", "kernels.py", "verifier.py", "cuda.py")  # with tests in tests/gpu
#: folders of tests, and files of tests/, that call the sources
TESTS = (
    *("algorithms", "checkpoints", "data", "engines", "rollout", "single_controller", "trainer", "workers"),
    *("test_columns.py", "test_dataflow*.py", "test_public*.py", "utils/test_public*.py", "utils/test_redaction.py"),
)
HEAVY = (
    *("torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.tensor", "tensordict"),
    *("transformers", "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2"),
    *("transformers.models.auto.modeling_auto", "transformers.generation", "pyarrow.parquet", "numpy", "pydantic"),
    *("omegaconf", "rich.console", "rich.table", "rich.live", "typer", "safetensors.torch", "pytest", "hypothesis"),
    *("_pytest.assertion.rewrite", "pytest_timeout", "peft", "ray", "sympy", "yaml", "httpx", "asyncio", "PIL.Image"),
    *("pydantic.main", "pydantic.json_schema", "pydantic._internal._generate_schema", "starlette.applications"),
)


def sources(only: list[str]) -> list[str]:
    """Paths of the files that get faults."""
    paths = [p for name in SOURCES for p in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("*.py"))]
    names = sorted(path.relative_to(ROOT).as_posix() for path in paths)
    names = [name for name in names if not any(word in name for word in ELSEWHERE)]
    return [name for name in names if not only or any(name.startswith(prefix) for prefix in only)]


def draw(number: int, seed: int, only: list[str]) -> list[Mutant]:
    """Random faults. Dropped: those on a GPU, and the few that leave the program as it is (equal arguments swapped)."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in sources(only)}
    mutants = [mutant for name, text in texts.items() for mutant in mutants_of(name, text)]
    drawn = random.Random(seed).sample(mutants, min(number + 100, len(mutants)))
    drawn = [mutant for mutant in drawn if Path(mutant.path).name not in ON_GPU]
    different = (m for m in drawn if tree_of(m.source(texts[m.path])) != tree_of(texts[m.path]))
    return [mutant for _, mutant in zip(range(number), different)]


def tree_of(source: str) -> str:
    return ast.dump(ast.parse(source))


# ---- the copy and its processes -------------------------------------------------------------------------------------


class Copy:
    """A copy of the repository in which one file at a time has a fault."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True)
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        self._time = time.time() - 1e6

    def write(self, path: str, source: str) -> None:
        """Each version has its own time in seconds: Python compares those, and the size, with the compiled file."""
        (self.folder / path).write_text(source, encoding="utf-8")
        self._time += 2
        os.utime(self.folder / path, (self._time, self._time))


def descendants() -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    pids = [os.getpid()]
    for pid in pids:
        pids += [child for child, parent in parents.items() if parent == pid]
    return pids[1:]


def kill_descendants() -> None:
    """Ends everything that a run of tests left behind; this process has adopted what lost its parent."""
    while pids := descendants():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


class Plugin:
    """Selects and orders the tests, and notes seconds, outcomes and, with a tracer, the functions called."""

    def __init__(self, wanted: list[str] | None, tracer: Any = None) -> None:
        self.wanted, self.tracer = wanted, tracer
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.passed: set[str] = set()

    def pytest_collection_modifyitems(self, items: list) -> None:
        if self.wanted is not None:
            order = {name: i for i, name in enumerate(self.wanted)}
            items[:] = sorted((i for i in items if i.nodeid in order), key=lambda item: order[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if self.tracer:
            self.tracer.start(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed.append(report.nodeid or "collection")


#: the tracer of functions, for this process and, as sitecustomize.py, for those that tests start
TRACER = """
import os, sys, threading

ROOT, OUT = os.environ["MUTANTS_ROOT"], os.environ["MUTANTS_TRACE"]
seen, name, file = set(), None, os.open(OUT, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def trace(frame, event, arg):
    code = frame.f_code
    if id(code) not in seen:
        seen.add(id(code))
        if code.co_filename.startswith(ROOT):
            # a process that is forked by a server gets its environment later
            if test := name or os.environ.get("PYTEST_CURRENT_TEST", "").rsplit(" (", 1)[0]:
                os.write(file, f"{test}\\t{code.co_filename[len(ROOT):]}\\t{code.co_qualname}\\n".encode())


def start(test=None):
    global name
    name = test
    seen.clear()
    sys.settrace(trace)
    threading.settrace(trace)


os.register_at_fork(after_in_child=seen.clear)
if not os.environ.pop("MUTANTS_OWN", None):
    start()
"""


def run_tests(place: Copy, tests: list[str], options: list[str], limit: float, selected=None, trace=False) -> dict:
    """Runs tests in a forked child; {"code": exit status or "timeout", "failed", "passed", "seconds"}."""
    work = place.folder.parent / f"{place.folder.name}_run"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = _tests_in_child(place.folder, work, tests, options, selected, trace)
        finally:
            os._exit(code)
    end, code = time.monotonic() + limit, "timeout"
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    kill_descendants()
    result = {"failed": [], "passed": [], "seconds": {}}
    if (work / "result.json").is_file():
        result = json.loads((work / "result.json").read_text(encoding="utf-8"))
    if (work / "trace").is_file():
        result["trace"] = (work / "trace").read_text(encoding="utf-8").splitlines()
    return {"code": code, "output": (work / "output").read_text(errors="replace", encoding="utf-8")[-3000:]} | result


def _tests_in_child(folder: Path, work: Path, tests: list[str], options: list[str], selected, trace: bool) -> int:
    import pytest

    output = os.open(work / "output", os.O_WRONLY | os.O_CREAT)
    for fd, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(fd, target)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, if this command runs in the background
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)
    tracer = None
    if trace:
        hook = work / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(TRACER, encoding="utf-8")
        os.environ |= {"MUTANTS_ROOT": f"{folder}/", "MUTANTS_TRACE": str(work / "trace")}
        os.environ["PYTHONPATH"] += os.pathsep + str(hook)
        sys.modules.pop("sitecustomize", None)
        sys.path.append(str(hook))
        os.environ["MUTANTS_OWN"] = "1"
        tracer = importlib.import_module("sitecustomize")
    plugin = Plugin(selected, tracer)
    arguments = [*tests, *options, "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={work / 'tmp'}"]
    code = pytest.main(arguments, plugins=[plugin])
    result = {"failed": plugin.failed, "passed": sorted(plugin.passed), "seconds": plugin.seconds}
    (work / "result.json").write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    return int(code)


# ---- which tests call which function --------------------------------------------------------------------------------


def test_files() -> list[str]:
    files = []
    for name in TESTS:
        files += sorted((ROOT / "tests").glob(name if name.endswith(".py") else f"{name}/**/test_*.py"))
    return [path.relative_to(ROOT).as_posix() for path in files if not any(word in path.name for word in ELSEWHERE)]


class Calls:
    """The functions that each test calls, and its seconds. A test file is measured again when it changed."""

    def __init__(self, options: list[str]) -> None:
        self.options, self.folder = options, BUILD / "map"
        self.seconds: dict[str, float] = {}
        self.tests: dict[str, set[str]] = {}  # "path::function" or path -> tests

    def measure(self, place: Copy, file: str) -> None:
        note = self.folder / (file.replace("/", "__") + ".json")
        key = hashlib.sha256((ROOT / file).read_bytes() + repr(self.options).encode()).hexdigest()
        record = json.loads(note.read_text(encoding="utf-8")) if note.is_file() else {}
        if record.get("key") != key:
            ran = run_tests(place, [file], self.options, limit=1800, trace=True)
            functions: dict[str, list[str]] = {}
            for line in ran.pop("trace", []):
                test, path, name = line.split("\t")
                while name.endswith((">", ".<locals>")):  # lambdas and comprehensions
                    name = name.rpartition(".<")[0]
                functions.setdefault(f"{path}::{name}", []).append(test)
            record = {"key": key, "functions": functions, **ran}
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(json.dumps(record), encoding="utf-8")
            seconds = sum(record["seconds"].values())
            say(f"{file}: {len(record['passed'])} tests, {seconds:.0f} s, failed {record['failed']}")
        trusted = set(record["passed"]) - set(record["failed"])
        self.seconds |= {test: seconds for test, seconds in record["seconds"].items() if test in trusted}
        for function, tests in record["functions"].items():
            for name in (function, function.partition("::")[0]):
                self.tests.setdefault(name, set()).update(trusted.intersection(tests))

    def of(self, mutant: Mutant, seconds: float, without: set[str]) -> list[str]:
        """Tests that call the function of a fault, or its file: those of the mirror first, then the fastest."""
        tests = self.tests.get(f"{mutant.path}::{mutant.function}") if mutant.function else None
        if tests is None:  # code of a module or class, or a function that only untraced processes call
            tests, seconds = self.tests.get(mutant.path, set()), seconds / 2
        path = Path(mutant.path)

        def rank(test: str) -> tuple[int, float]:
            file = Path(test.partition("::")[0])
            near = file.stem.removeprefix("test_") in path.stem or path.stem in file.stem
            return (0 if near else 1 if file.parts[1] in path.parts else 2), self.seconds[test]

        selected, total = [], 0.0
        for test in sorted(tests - without, key=rank):
            if selected and total + self.seconds[test] > seconds:
                continue
            selected.append(test)
            total += self.seconds[test]
        return selected


# ---- judging --------------------------------------------------------------------------------------------------------


def key_of(mutant: Mutant) -> str:
    """The fault and the file in which it is."""
    return hashlib.sha256(f"{mutant}{(ROOT / mutant.path).read_text(encoding='utf-8')}".encode()).hexdigest()[:16]


def judge(place: Copy, mutant: Mutant, calls: Calls, seconds: float, without: set[str]) -> dict[str, Any]:
    """Runs the tests of one fault."""
    original = (ROOT / mutant.path).read_text(encoding="utf-8")
    entry = {name: getattr(mutant, name) for name in ("path", "line", "function", "fault")}
    entry |= {"key": key_of(mutant), "diff": mutant.diff(original), "seconds": 0.0, "by": None}
    tests = calls.of(mutant, seconds, without)
    entry["tests"] = len(tests)
    if not tests:
        return entry | {"status": "survived", "why": "no test calls it"}
    source = mutant.source(original)
    limit = 5 * sum(calls.seconds[test] for test in tests) + 60
    begin = time.monotonic()
    place.write(mutant.path, source)
    try:
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        ran = run_tests(place, files, [*calls.options, "-x"], limit, selected=tests)
    finally:
        place.write(mutant.path, original)
    # 5, no test is left: a parametrized test of something that the fault removes
    status = {0: "survived", "timeout": "timeout"}.get(ran["code"], "killed")
    by = ran["failed"][0] if ran["failed"] else f"exit status {ran['code']}" if status == "killed" else None
    return entry | {"status": status, "by": by, "seconds": round(time.monotonic() - begin, 1)}


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


def share_out(items: list[Any], jobs: int, work: Any) -> list[Any]:
    """work(copy, item) for each item, in forked processes; results as they come, in the order of the items."""
    folder = BUILD / "jobs"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pids = []
    for job in range(jobs):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: see kill_descendants
                place = Copy(BUILD / f"copy_{job}")
                with open(folder / f"{job}.jsonl", "w", encoding="utf-8") as file:
                    for i in range(job, len(items), jobs):
                        print(json.dumps([i, work(place, items[i])]), file=file, flush=True)
                status = 0
            except BaseException as error:
                say(f"job {job}: {error!r}")
            finally:
                os._exit(status)
        pids.append(pid)
    if any([os.waitpid(pid, 0)[1] for pid in pids]):
        raise RuntimeError("a job failed: see its line above")
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    return [result for _, result in sorted((json.loads(line) for line in lines), key=lambda pair: pair[0])]


def judge_all(mutants: list[Mutant], calls: Calls, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Judges the faults that were not found before. A kill counts if its test passes without the fault."""
    notes, entries = BUILD / "found.jsonl", {}
    if arguments.fresh:
        notes.unlink(missing_ok=True)
    elif arguments.record and arguments.record.is_file():
        entries = {entry["key"]: entry for entry in json.loads(arguments.record.read_text(encoding="utf-8"))["mutants"]}
    lines = notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []
    entries |= {entry["key"]: entry for entry in map(json.loads, lines)}

    def note(entry: dict[str, Any]) -> None:
        with notes.open("a", encoding="utf-8") as file:
            print(json.dumps(entry), file=file, flush=True)
        entries[entry["key"]] = entry

    def one(place: Copy, mutant: Mutant, without: frozenset[str] = frozenset()) -> dict[str, Any]:
        entry = judge(place, mutant, calls, arguments.seconds, set(without))
        say(f"{entry['status']:8} {entry['seconds']:6.1f} s  {mutant.path}:{mutant.line} {mutant.fault}  {entry['by']}")
        note(entry)
        return entry

    def undisturbed(place: Copy, file: str) -> list[str]:
        tests = sorted({test for test in killers if test.startswith(f"{file}::")})
        limit = 5 * sum(calls.seconds.get(test, 10.0) for test in tests) + 60
        ran = run_tests(place, [file], calls.options, limit, selected=tests)
        return sorted(set(tests) - set(ran["passed"]))

    todo = [mutant for mutant in mutants if entries.get(key_of(mutant), {"status": "survived"})["status"] == "survived"]
    say(f"{len(mutants) - len(todo)} of {len(mutants)} faults were found before")
    entries |= {entry["key"]: entry for entry in share_out(todo, arguments.jobs, one)}
    unchecked = [entries[key_of(m)] for m in mutants if not entries[key_of(m)].get("checked")]
    killers = [entry["by"] for entry in unchecked if "::" in (entry["by"] or "")]
    files = sorted({test.partition("::")[0] for test in killers})
    unstable = {test for tests in share_out(files, arguments.jobs, undisturbed) for test in tests}
    for entry in unchecked:
        if entry["status"] != "survived" and entry["by"] not in unstable:
            note(entry | {"checked": True})
    again = [mutant for mutant in mutants if entries[key_of(mutant)]["by"] in unstable]
    if again:
        say(f"fail without a fault too: {sorted(unstable)}; {len(again)} faults are judged again without them")
        second = share_out(again, arguments.jobs, lambda place, mutant: one(place, mutant, frozenset(unstable)))
        entries |= {entry["key"]: entry for entry in second}
    return [entries[key_of(mutant)] for mutant in mutants]


def report(results: list[dict[str, Any]], **about: Any) -> dict[str, Any]:
    """Prints a table and the survivors; the record of a run."""
    counts: dict[str, dict[str, int]] = {}
    for entry in results:
        for group in ("/".join(entry["path"].split("/")[:2]), "all"):
            row = counts.setdefault(group, {"killed": 0, "timeout": 0, "survived": 0})
            row[entry["status"]] += 1
    print(f"\n{'':28}{'killed':>9}{'timeout':>9}{'survived':>9}")
    for group, row in sorted(counts.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        print(f"{group:28}{row['killed']:9}{row['timeout']:9}{row['survived']:9}")
    for entry in results:
        if entry["status"] == "survived":
            print(f"\n{entry['path']}:{entry['line']}  {entry['function']}  ({entry['fault']}, {entry['tests']} tests)")
            print(entry["diff"])
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, encoding="utf-8")
    short = [{k: v for k, v in f.items() if k != "diff" or f["status"] == "survived"} for f in results]
    return about | {"commit": commit.stdout.strip(), "counts": counts, "mutants": short}


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=300, help="faults (300)")
    parser.add_argument("--seed", type=int, default=1, help="which faults (1)")
    parser.add_argument("--only", nargs="*", default=[], help="only files whose path begins so")
    parser.add_argument("--jobs", type=int, default=1, help="faults judged at the same time (1)")
    parser.add_argument("--seconds", type=float, default=30.0, help="tests of one fault, in undisturbed seconds (30)")
    parser.add_argument("--markers", default="not slow and not gpu", help="tests that are used, as in `pytest -m`")
    parser.add_argument("--fresh", action="store_true", help="judges the faults that were found before again, too")
    parser.add_argument("--list", action="store_true", help="prints the faults and runs nothing")
    parser.add_argument(
        "--record", type=Path, help="JSON file to write, and to continue (build/mutants/seed_SEED.json)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of()
    mutants = draw(arguments.number, arguments.seed, arguments.only)
    if arguments.list:
        for m in mutants:
            print(f"{m.path}:{m.line} {m.fault}\n{m.diff((ROOT / m.path).read_text(encoding='utf-8'))}")
        return
    sys.path[:] = [p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "scripts")]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in HEAVY:
        try:
            importlib.import_module(name)
        except ImportError:
            say(f"not installed: {name}")
    gc.freeze()  # a collection in a child would copy the memory of all these modules
    assert not any(name == "verl" or name.startswith("verl.") for name in sys.modules)
    calls, files = Calls(["-m", arguments.markers]), test_files()
    share_out(files, arguments.jobs, calls.measure)
    if not mutants:
        return
    for file in files:
        calls.measure(None, file)
    record = report(judge_all(mutants, calls, arguments), seed=arguments.seed, number=len(mutants))
    path = arguments.record or BUILD / f"seed_{arguments.seed}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)


if __name__ == "__main__":
    main()
