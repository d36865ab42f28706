"""Tools of MCP servers (Model Context Protocol), through the package `mcp`: stdio and streamable HTTP.

An entry of the file of `rollout.multi_turn.tool_config_path`, instead of class_name:

    tools:
      - mcp: {command: python, args: [server.py], env: {KEY: value}}
      - mcp: {url: "http://127.0.0.1:8000/mcp", headers: {Authorization: "Bearer TOKEN"}, tools: [search]}

`tools` selects tools of the server by name; the default is all. Every tool process has its own connection.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.registry import did_you_mean

KEYS = {"command", "args", "env", "cwd", "url", "headers", "tools"}
CONNECT_SECONDS = 60.0


class MCPServer:
    """A connection to a server, held by a thread with its own event loop.

    Raises:
        ValueError: wrong keys, or the server cannot be reached.
    """

    def __init__(self, settings: Mapping[str, Any], location: str):
        for name in settings:
            if name not in KEYS:
                raise ValueError(f"{location}: mcp: unknown key {name!r}: {did_you_mean(name, KEYS)}")
        if ("command" in settings) == ("url" in settings):
            raise ValueError(f"{location}: mcp: expected either command or url, found {sorted(settings)}")
        self.settings, self.location = settings, location
        self.connect()

    def connect(self) -> None:
        """Connect and list the tools: `tools`, as mappings with name, description and inputSchema."""
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._connected: concurrent.futures.Future = concurrent.futures.Future()
        threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True).start()
        try:
            self._session, self.tools = self._connected.result(CONNECT_SECONDS)
        except ModuleNotFoundError as error:
            message = f"{self.location}: mcp needs the package {error.name}: pip install -e '.[mcp]' in a clone"
            raise ValueError(message) from error
        except Exception as error:
            address = self.settings.get("url") or self.settings.get("command")
            raise ValueError(f"{self.location}: no connection to the MCP server {address!r}: {error!r}") from error

    async def _serve(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                session = await self._open(stack)
                await session.initialize()
                listed = (await session.list_tools()).tools
                self._connected.set_result((session, [tool.model_dump(by_alias=True) for tool in listed]))
                await self._end.wait()
        except BaseException as error:  # of the package and of the transport, also in groups
            if not self._connected.done():
                self._connected.set_exception(error)

    async def _open(self, stack: contextlib.AsyncExitStack) -> Any:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        settings = {name: value for name, value in self.settings.items() if name != "tools"}
        if "command" in settings:
            transport = stdio_client(StdioServerParameters(**settings))
        else:
            client = await stack.enter_async_context(create_mcp_http_client(headers=settings.get("headers")))
            transport = streamable_http_client(settings["url"], http_client=client)
        read, write, *_ = await stack.enter_async_context(transport)
        return await stack.enter_async_context(ClientSession(read, write))

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a response. Raises RuntimeError with the text of an error."""
        future = asyncio.run_coroutine_threadsafe(self._session.call_tool(name, arguments), self._loop)
        result = (await asyncio.wrap_future(future)).model_dump(by_alias=True)
        text = "\n".join(item["text"] for item in result["content"] if item["type"] == "text")
        if result.get("isError"):
            raise RuntimeError(text)
        return text

    def close(self) -> None:
        """End the connection, and a server that it has started."""
        self._loop.call_soon_threadsafe(self._end.set)


class MCPTool(BaseTool):
    """One tool of a server."""

    def __init__(self, server: MCPServer, tool: Mapping[str, Any]):
        function = {"name": tool["name"], "description": tool.get("description") or ""}
        function["parameters"] = tool["inputSchema"]
        super().__init__({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
        self.server = server

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text=await self.server.call(self.name, parameters)), 0.0, {}


def tools_of_server(settings: Any, location: str) -> list[MCPTool]:
    """The selected tools of a server. Raises ValueError as `MCPServer`, and for a tool that it does not have."""
    if not isinstance(settings, Mapping):
        raise ValueError(f"{location}: mcp: expected a mapping with command or url, found {settings!r}")
    server = MCPServer(settings, location)
    tools = {tool["name"]: MCPTool(server, tool) for tool in server.tools}
    for name in (selected := settings.get("tools") or list(tools)):
        if name not in tools:
            server.close()
            raise ValueError(f"{location}: mcp: the server has no tool {name!r}: {did_you_mean(name, tools)}")
    return [tools[name] for name in selected]
