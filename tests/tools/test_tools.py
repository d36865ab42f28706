"""Schemas of functions, files of tools, arguments and results, and truncation."""

import asyncio
import math

import numpy as np
import pytest
import torch

from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.function_tool import infer_schema
from verl.agents.tools.host import (
    Observation,
    Rewards,
    ToolHost,
    ToolSettings,
    read_arguments,
    read_result,
    truncate_text,
)
from verl.agents.tools.load import load_interactions, load_tools, read_yaml_list, tool_schemas
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

PUBLIC_FORM = """
from typing import Any, Optional
from uuid import uuid4
from verl.agents.tools.base_tool import BaseTool
from verl.agents.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

class Answers(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        truth = kwargs.get("ground_truth") or kwargs.get("create_kwargs", {}).get("ground_truth")
        self._instance_dict[instance_id] = {"truth": truth, "tries": 0, "right": 0.0}
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        state = self._instance_dict[instance_id]
        state["tries"] += 1
        state["right"] = float(parameters["answer"] == state["truth"])
        return ToolResponse(text=f"try {state['tries']} of {self.config['limit']}"), -0.05 * (1 - state["right"]), {}

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        return self._instance_dict[instance_id]["right"] + kwargs.get("bonus", 0)

    async def release(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
"""
CONFIG = """
tools:
  - class_name: "answers.py:Answers"
    config: {type: native, limit: 3}
    tool_schema:
      type: function
      function:
        name: check
        description: Check an answer.
        parameters:
          type: object
          properties: {answer: {type: string, description: the answer}}
          required: [answer]
"""


@pytest.fixture
def public_tool(tmp_path) -> str:
    (tmp_path / "answers.py").write_text(PUBLIC_FORM)
    (tmp_path / "tools.yaml").write_text(CONFIG)
    return str(tmp_path / "tools.yaml")


def test_a_tool_of_public_verl_keeps_an_instance_per_trajectory(public_tool):
    async def run() -> None:
        host = ToolHost(ToolSettings(tool_config_path=public_tool))
        kwargs = {"create_kwargs": {"ground_truth": "7"}, "calc_reward_kwargs": {"bonus": 0.5}}
        first = await host.execute("a", "check", {"answer": "6"}, kwargs)
        assert first == Observation("try 1 of 3", -0.05)
        assert await host.execute("b", "check", {"answer": "7"}, kwargs) == Observation("try 1 of 3", -0.0)
        assert (await host.execute("a", "check", {"answer": "7"}, kwargs)).text == "try 2 of 3"
        assert await host.rewards("a", {"check": kwargs}) == Rewards({"check": 1.5}, {})
        # named in tools_kwargs, and never called
        assert await host.rewards("c", {"check": kwargs}) == Rewards({"check": 0.5}, {})
        assert await host.rewards("b", {}) == Rewards({"check": 1.0}, {})
        assert host.tools["check"]._instance_dict == {}

    asyncio.run(run())


def test_the_schema_is_what_the_template_receives(public_tool):
    (schema,) = tool_schemas(public_tool, None)
    parameters = {"type": "object", "properties": {"answer": {"type": "string", "description": "the answer"}}}
    parameters["required"] = ["answer"]
    function = {"name": "check", "description": "Check an answer.", "parameters": parameters}
    assert schema == {"type": "function", "function": function}


def test_the_schema_of_a_function():
    def look_up(city: str, days: int = 1, kind: list[str] | None = None) -> str:
        """Look up the weather.

        Args:
            city: name of the city,
                with its country.
            days (int): number of days.
            kind: what to return.

        Returns:
            The weather.
        """

    found = infer_schema(look_up).for_template()["function"]
    assert found["name"] == "look_up" and found["description"] == "Look up the weather."
    assert found["parameters"] == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "name of the city, with its country."},
            "days": {"type": "integer", "description": "number of days."},
            "kind": {
                "type": "array",
                "items": {"type": "string"},
                "nullable": True,
                "description": "what to return.",
            },
        },
        "required": ["city"],
    }


def test_functions_without_a_schema():
    def untyped(a):
        """A."""

    def undescribed(a: int):
        """A."""

    def many(*a: int):
        """A."""

    def unknown(a: complex):
        """A.

        Args:
            a: one.
        """

    def bare() -> None: ...

    messages = {untyped: "missing a type hint", undescribed: "no description for the argument 'a'"}
    messages |= {many: "parameter 'a': expected a named parameter", unknown: "complex", bare: "no docstring"}
    for func, message in messages.items():
        with pytest.raises(ValueError, match=f"function tool {func.__name__}: .*{message}"):
            infer_schema(func)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: 3", "expected a list below 'tools', found int"),
        ("tools: [{class: a}]", "unknown key 'class': did you mean 'class_name'"),
        ("tools: [{config: {}}]", "expected class_name"),
        ("tools: [{class_name: nothing}]", "expected package.module.Class"),
        ("tools: [{class_name: 'answers.py:Nobody'}]", "defines no 'Nobody'"),
        ("tools: [{class_name: 'answers.py:Answers', config: {}}]", "Answers has no schema"),
        ("tools: [{class_name: 'answers.py:Answers', tool_schema: {type: x}}]", "tool_schema: "),
        (CONFIG + CONFIG.replace("\ntools:", ""), "there are two tools 'check'"),
    ],
)
def test_invalid_files_of_tools(text, message, public_tool, tmp_path):
    (tmp_path / "tools.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tools(public_tool, None)


@pytest.mark.parametrize("where", ["import", "constructor", "exit"])
def test_a_tool_that_fails_at_the_start_is_one_error_with_its_line(where, tmp_path):
    fails = {"import": "1 / 0", "exit": "raise SystemExit(3)"}.get(where, "x = 1")
    body = (
        f"{fails}\nclass Broken:\n    def __init__(self, **kwargs):\n        {{}}['x']\n    generate_response = None\n"
    )
    (tmp_path / "broken.py").write_text(body)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: 'broken.py:Broken'}]")
    expected = {
        "import": r"tools\[0\]: class_name: broken.py:Broken failed: ZeroDivisionError: .*broken.py:1\)",
        "constructor": r"tools\[0\]: Broken failed: KeyError: 'x' \(.*broken.py:4\)",
        "exit": r"broken.py calls sys.exit\(3\) while it is imported",
    }[where]
    with pytest.raises(ValueError, match=expected):
        load_tools(str(tmp_path / "tools.yaml"), None)
    if where == "constructor":
        (tmp_path / "talk.yaml").write_text("interaction: [{name: x, class_name: 'broken.py:Broken'}]")
        with pytest.raises(ValueError, match="interaction 'x': Broken failed: KeyError"):
            load_interactions(str(tmp_path / "talk.yaml"))


def test_missing_files(tmp_path):
    with pytest.raises(ValueError, match="no file"):
        load_tools(str(tmp_path / "no.yaml"), None)
    (tmp_path / "empty_tools.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="decorated with @function_tool, found none"):
        load_tools(None, str(tmp_path / "empty_tools.py"))
    assert load_interactions(None) == {} and load_tools(None, None) == {}


@pytest.mark.parametrize(
    ("side", "limit", "expected"),
    [
        ("right", 4, "abcd...(truncated)"),
        ("left", 4, "(truncated)...ghij"),
        ("middle", 4, "ab...(truncated)...ij"),
        ("middle", 5, "ab...(truncated)...ij"),
        ("middle", 1, "...(truncated)..."),
    ],
)
def test_truncation(side, limit, expected):
    assert truncate_text("abcdefghij", limit, side) == expected
    assert truncate_text("abcdefghij"[:limit], limit, side) == "abcdefghij"[:limit]


def test_arguments_get_the_types_of_the_schema():
    kinds = {"n": "integer", "x": "number", "on": "boolean", "items": "array", "text": "string"}
    schema = {"properties": {name: {"type": kind} for name, kind in kinds.items()}}
    given = {"n": "3", "x": "2.5", "on": "True", "items": "[1]", "text": "4", "other": "5"}
    found = read_arguments(given, schema)
    assert found == {"n": 3, "x": 2.5, "on": True, "items": [1], "text": "4", "other": "5"}
    nested = {"box": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    nested |= {"all": {"type": "array", "items": {"type": "number"}}, "or": {"anyOf": [{"type": "integer"}, {}]}}
    nested |= {"maybe": {"type": ["integer", "null"]}, "null": {"type": "integer", "nullable": True}}
    nested |= {"zip": {"type": "string"}, "whole": {"type": "integer"}, "any": {}, "size": {"type": "float"}}
    given = {"box": '{"n": "3"}', "all": ["1", 2.5], "or": "7", "maybe": None, "null": None}
    given |= {"zip": 123, "whole": 5.0, "any": None, "size": "x"}
    found = read_arguments(given, {"properties": nested})
    assert found == given | {"box": {"n": 3}, "all": [1, 2.5], "or": 7, "zip": "123", "whole": 5}
    assert isinstance(found["whole"], int)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(("integer", value) for value in ("three", 2.5, "2.5", True, None, "null", [1], "")),
        *(("number", value) for value in ("NaN", math.nan, math.inf, "1e999", None, "x", False)),
        *(("boolean", value) for value in ("yes", 1, None)),
        *(("array", value) for value in ("[1", {"a": 1}, None)),
        *((kind, None) for kind in ("string", "object")),
        (None, math.nan),
    ],
)
def test_arguments_of_another_type_are_refused(kind, value):
    with pytest.raises(ValueError, match=f"argument 'n': expected {kind or 'a finite number'}, found "):
        read_arguments({"n": value}, {"properties": {"n": {"type": kind}}})


def test_a_return_value_is_an_observation():
    """A reward comes only from a ToolResponse: a coordinate is none."""
    assert read_result("a") == read_result(ToolResponse(text="a")) == Observation("a")
    for reward in (np.float32(0.5), True, torch.tensor(0.5)):
        assert read_result((ToolResponse(text="a"), reward, {})) == Observation("a", float(reward))
    assert read_result((ToolResponse(text="a"), 0.5)) == Observation("a", 0.5)
    values = {(12.5, 48.1): "[12.5, 48.1]", (1, 2, 3): "[1, 2, 3]", ("a",): '["a"]', ("a", None): '["a", null]'}
    values |= {("a", np.int64(2)): '["a", 2]', ("a", "b"): '["a", "b"]', ("a", 0.5, ()): '["a", 0.5, []]'}
    assert {value: read_result(value) for value in values} == {v: Observation(text) for v, text in values.items()}
    assert read_result([1, 2.5]) == Observation("[1, 2.5]") and read_result({"a": [1]}) == Observation('{"a": [1]}')
    assert read_result(np.array([1, 2])) == Observation("[1, 2]") and read_result(7) == Observation("7")
    for reward in ("high", float("nan"), float("inf"), np.float32("nan"), 10**400):
        with pytest.raises(ValueError, match="a finite number as reward, found "):
            read_result((ToolResponse(text="a"), reward, {}))
    assert read_result(None) == Observation("null") and read_result(ToolResponse()) == Observation("")
    with pytest.raises(ValueError, match="images"):
        read_result(ToolResponse(image=[1]))


@pytest.mark.parametrize(
    ("value", "observation"),
    [
        ((ToolResponse(text="a"), 0.5, {}), Observation("a", 0.5)),
        (("a", 0.5, {}), Observation("a", 0.5)),  # as `execute` of older releases of public verl
        (["a", 0.5, {}], Observation('["a", 0.5, {}]')),
        (("a", 0.5), Observation('["a", 0.5]')),
        ((1, 2, 3), Observation("[1, 2, 3]")),
    ],
)
def test_results_of_execute(value, observation, public_tool):
    class Returns(BaseTool):
        async def execute(self, instance_id, parameters, **kwargs):
            return value

    host = ToolHost(ToolSettings(tool_config_path=public_tool))
    schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": "returns"}})
    host.tools["returns"] = Returns({}, schema)
    assert asyncio.run(host.execute("t", "returns", {}, {})) == observation


def test_calls_of_one_turn_share_an_instance(tmp_path):
    """`create` may wait, as for a sandbox: the second call must not create the instance again."""
    (tmp_path / "answers.py").write_text(
        "import asyncio\n"
        + PUBLIC_FORM.replace("        truth =", "        await asyncio.sleep(0.01)\n        truth =").replace(
            "state = self", "await asyncio.sleep(0.01)\n        state = self"
        )
    )
    (tmp_path / "tools.yaml").write_text(CONFIG)
    host = ToolHost(ToolSettings(str(tmp_path / "tools.yaml")))

    async def turn() -> list[Observation]:
        return await asyncio.gather(*(host.execute("t", "check", {"answer": "x"}, {}) for _ in range(3)))

    assert [found.text for found in asyncio.run(turn())] == [f"try {n} of 3" for n in (1, 2, 3)]
    assert list(host._instances) == [("t", "check")] and not host._creating


def test_a_tool_without_execute_fails_its_calls(tmp_path):
    schema = {"type": "function", "function": {"name": "t"}}
    tool = BaseTool({}, OpenAIFunctionToolSchema.model_validate(schema))
    with pytest.raises(NotImplementedError, match="does not define execute"):
        asyncio.run(tool.execute("x", {}))


def test_an_error_of_one_tool_keeps_the_rewards_of_others_and_releases_all(public_tool):
    class Broken(BaseTool):
        async def create(self, instance_id=None, **kwargs):
            return instance_id, ToolResponse()

        async def calc_reward(self, instance_id, **kwargs):
            raise self.config["error"]

        async def release(self, instance_id, **kwargs):
            released.append(self.name)

    released: list[str] = []
    host = ToolHost(ToolSettings(tool_config_path=public_tool))
    for name, error in (("broken", ValueError("no reward")), ("exits", SystemExit(3))):
        schema = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": {"name": name}})
        host.tools[name] = Broken({"error": error}, schema)
    kwargs = {"broken": {}, "exits": {}, "check": {"calc_reward_kwargs": {"bonus": 0.5}}}
    ended = asyncio.run(host.rewards("a", kwargs))
    assert ended == Rewards({"check": 0.5}, {"broken": "ValueError: no reward", "exits": "SystemExit: 3"})
    assert sorted(released) == ["broken", "exits"] and not host._instances
    assert not host.tools["check"]._instance_dict


@pytest.mark.parametrize("content", [b"tools: [1", b"\x00\x00", b"\xff\xfe", b"7", b""])
def test_a_file_of_tools_that_cannot_be_read(content, tmp_path):
    (tmp_path / "tools.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"tools\.yaml: (not a YAML file|expected a list)"):
        read_yaml_list(str(tmp_path / "tools.yaml"), "tools")
