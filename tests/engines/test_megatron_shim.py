"""What replaces functions of torch.cuda for tests of Megatron on a CPU must not do so where there is a GPU."""

import importlib.util
from pathlib import Path

import pytest

from tests.programs import run_python

ROOT = Path(__file__).parents[2]
#: reads and writes functions as tests do that use CUDA, in a process that has a GPU
WITH_GPU = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
names = ("current_stream", "current_device", "Stream", "Event", "synchronize", "manual_seed")
before = [getattr(torch.cuda, name) for name in names] + [torch.empty, torch.Tensor.to]
"""
UNCHANGED = """
after = [getattr(torch.cuda, name) for name in names] + [torch.empty, torch.Tensor.to]
assert all(a is b for a, b in zip(after, before)), "replaced"
"""


def run(code: str) -> str:
    found = run_python("-c", WITH_GPU + code + UNCHANGED, cwd=ROOT)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_the_shim_refuses_a_process_with_a_gpu():
    run("""
with pytest.raises(RuntimeError, match="expected a process without a GPU, found one: set CUDA_VISIBLE_DEVICES="):
    import tests.engines.megatron_cpu.shim
""")


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_the_tests_of_megatron_are_skipped_where_there_is_a_gpu():
    """`pytest -m gpu` collects all files."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if "if reason := skip_reason()" in path.read_text()]
    files = sorted(str(path.relative_to(ROOT)) for path in files if path != Path(__file__))
    assert len(files) >= 7
    found = run(f"""
class Skipped:
    def pytest_collectreport(self, report):
        if report.skipped:
            print("skipped:", report.nodeid, report.longrepr[2])

pytest.main(["--collect-only", "-m", "gpu", "-p", "no:cacheprovider", *{files}], plugins=[Skipped()])
""")
    lines = [line for line in found.splitlines() if line.startswith("skipped:")]
    assert len(lines) == len(files) and all("replaces functions of torch.cuda" in line for line in lines), found
