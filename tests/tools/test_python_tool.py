"""The tool that runs Python: through the file of tools, in a worker process, as a rollout calls it."""

import asyncio

import pytest

from verl.agents.tools.host import ToolHost, ToolSettings
from verl.agents.tools.processes import ToolProcesses
from verl.agents.tools.python_tool import PythonTool

ENTRY = (
    "tools:\n  - class_name: verl.agents.tools.python_tool.PythonTool\n    config: {timeout: 2, memory_limit_mb: 256}\n"
)
ARGUMENTS = {"name": "python", "kwargs": {}}


def settings(tmp_path) -> ToolSettings:
    (tmp_path / "tools.yaml").write_text(ENTRY)
    return ToolSettings(tool_config_path=str(tmp_path / "tools.yaml"), max_response_length=2000, truncate_side="left")


def test_a_worker_process_runs_scripts(tmp_path):
    tools = ToolProcesses(settings(tmp_path), size=1)
    call = tools.call("t", "execute", {**ARGUMENTS, "parameters": {"code": "print(6 * 7)"}}, 60.0)
    observation = asyncio.run(call)
    tools.close()
    assert observation.text == "42\n" and not observation.failed


def test_scripts_are_isolated_and_limited(tmp_path):
    host = ToolHost(settings(tmp_path))
    (tmp_path / "file").write_text("SECRET")

    def run(code: str) -> str:
        return asyncio.run(host.execute("t", "python", {"code": code}, {})).text

    assert "SECRET" not in run(f"print(open({str(tmp_path / 'file')!r}).read())")
    assert run("print(1, flush=True)\nwhile True: pass").endswith("The script did not end within 2 s.")
    assert "MemoryError" in run("b = bytearray(1 << 30)")
    assert run("import sys; sys.exit(3)").endswith("The script ended with exit status 3.")


def test_another_key_of_its_configuration_is_refused():
    with pytest.raises(ValueError, match="expected timeout and memory_limit_mb, found time"):
        PythonTool({"time": 3})
