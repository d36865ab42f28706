"""Tools of an MCP server: a real server over stdio and over HTTP, and clear errors without one."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

from verl.agents.tools.host import ToolSettings, ToolsInProcess
from verl.agents.tools.load import tool_schemas
from verl.single_controller.worker import free_port

SERVER = '''
import sys
try:
    from mcp.server.fastmcp import FastMCP as Server   # mcp 1
except ImportError:
    from mcp.server import MCPServer as Server         # mcp 2
server = Server("calculator")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)

@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("no luck")

if len(sys.argv) == 1:
    server.run("stdio")
elif hasattr(server, "streamable_http_app"):
    import uvicorn
    uvicorn.run(server.streamable_http_app(), port=int(sys.argv[1]), log_level="error")
'''


def results(path, *calls):
    runner = ToolsInProcess(ToolSettings(str(path)))

    async def run():
        arguments = [{"name": name, "parameters": parameters, "kwargs": {}} for name, parameters in calls]
        return [await runner.call("t", "execute", each, 30) for each in arguments]

    observations = asyncio.run(run())
    for server in {tool.server for tool in runner.host.tools.values()}:
        server.close()
    return [(each.text, each.failed) for each in observations]


@pytest.mark.slow
def test_tools_of_a_server_over_stdio_and_http(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    path = tmp_path / "tools.yaml"
    site = os.pathsep.join(sys.path)
    path.write_text(
        f"tools: [{{mcp: {{command: '{sys.executable}', args: ['{tmp_path / 'server.py'}'], "
        f"env: {{PYTHONPATH: '{site}'}}}}}}]"
    )
    add, _ = tool_schemas(str(path), None)
    assert add["function"]["name"] == "add" and add["function"]["description"] == "Add two integers."
    assert add["function"]["parameters"]["required"] == ["a", "b"]
    (total, failed, unknown) = results(path, ("add", {"a": "2", "b": 3}), ("fail", {}), ("sub", {}))
    assert total == ("5", False)
    assert failed[1] and "Error executing tool fail" in failed[0]
    assert unknown == ("error: ValueError: there is no tool 'sub': known: add, fail", True)
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, tmp_path / "server.py", str(port)], env=os.environ | {"PYTHONPATH": site}
    )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/")
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        path.write_text(
            f"tools: [{{mcp: {{url: 'http://127.0.0.1:{port}/mcp', headers: {{X-Key: k}}, tools: [add]}}}}]"
        )
        assert results(path, ("add", {"a": 1, "b": 1})) == [("2", False)]
        path.write_text(f"tools: [{{mcp: {{url: 'http://127.0.0.1:{port}/mcp', tools: [ad]}}}}]")
        with pytest.raises(ValueError, match="the server has no tool 'ad': did you mean 'add'"):
            tool_schemas(str(path), None)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "entry, message",
    [
        ("{comand: x}", "mcp: unknown key 'comand': did you mean 'command'"),
        ("{}", "mcp: expected either command or url"),
        ("{command: x, url: y}", "mcp: expected either command or url"),
        ("x", "mcp: expected a mapping with command or url, found 'x'"),
        ("{command: /no/such/program}", "no connection to the MCP server '/no/such/program'|needs the package mcp"),
    ],
)
def test_a_wrong_entry_or_no_server_is_one_error(entry, message, tmp_path):
    (tmp_path / "tools.yaml").write_text(f"tools: [{{mcp: {entry}}}]")
    with pytest.raises(ValueError, match=message):
        tool_schemas(str(tmp_path / "tools.yaml"), None)
