"""The parameters of a call of the HTTP server, and its errors, in the form of OpenAI's API.

A parameter that would change the result and is not supported is an error; it is accepted with the value that disables
it.
"""

import json
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from verl.agents.tools.schemas import check_tool

#: choices per prompt, and prompts per call
MAX_CHOICES = 128

#: parameters that do not change the result
_IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_IGNORED |= {"service_tier"}
#: parameters that are accepted only with a value that disables them; null always does
_OFF: dict[str, list[Any]] = {
    "frequency_penalty": [0],
    "presence_penalty": [0],
    "repetition_penalty": [1],
    "logit_bias": [{}],
    "response_format": [{"type": "text"}],
    "best_of": [1],
    "echo": [False],
    "suffix": [""],
    "parallel_tool_calls": [True],
    "top_logprobs": [0],
    "modalities": [["text"]],
    "use_beam_search": [False],
    "skip_special_tokens": [True],
    "include_stop_str_in_output": [False],
}
#: arguments of the tokenizer's method. A template of a client could compute for ever
_RESERVED = {"chat_template", "conversation", "tools", "tokenize", "add_generation_prompt", "continue_final_message"}
_RESERVED |= {"return_dict", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs"}
_RESERVED |= {"padding", "truncation", "max_length"}


class ApiError(Exception):
    """An error of a call, about the parameter `param`. Sent as {"error": {"message", "type", "param", "code"}}."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The response body."""
        types = {401: "authentication_error", 404: "not_found_error", 409: "conflict_error"}
        error_type = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}


def unsupported(param: str, message: str) -> ApiError:
    """The error of a parameter, or of a value of it, that is not supported."""
    return ApiError(400, message, param=param, code="unsupported_parameter")


@dataclass(frozen=True)
class Call:
    """A call of /chat/completions or /completions.

    Args:
        is_chat: whether it is a call of /chat/completions.
        model: the model's name, as the client gave it.
        messages, tools: for a chat. Message contents are text; `arguments` of tool calls are parsed.
        prompts: for /completions: texts or token ids.
        n: choices per prompt.
        max_tokens: maximum response length; None: the server's default.
        sampling: the sampling parameters that were given, by their names in `SamplingParams`.
        seed: determines the random numbers; None: a new seed.
        stop, stop_token_ids: strings and tokens that end a response, in addition to the model's end tokens.
        stream, include_usage: send chunks; send the usage in the last one.
        logprobs: return the log-prob of each sampled token.
        return_token_ids: return the token ids of prompt and response.
        template_kwargs: arguments of the chat template.
        call_id: identifies the call.
    """

    is_chat: bool
    model: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    prompts: list[str | list[int]] = field(default_factory=list)
    n: int = 1
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    call_id: str = ""


# ---- what a body may contain ----------------------------------------------------------------------------------------

_Number = Annotated[float, Field(strict=True)]
_Text = Annotated[str, Field(strict=True, min_length=1)]


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: StrictStr
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    temperature: Annotated[_Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[_Number, Field(ge=0, le=1)] | None = None
    ignore_eos: StrictBool | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: _Text | list[_Text] | None = None
    stop_token_ids: list[Annotated[int, Field(strict=True, ge=0)]] | None = None
    stream: StrictBool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: StrictBool | None = None


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: StrictStr
    text: StrictStr | None = None


class _FunctionCall(BaseModel):
    name: StrictStr
    arguments: StrictStr | dict[str, Any]


class _ToolCall(BaseModel):
    id: StrictStr | None = None
    type: StrictStr = "function"
    function: _FunctionCall


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")
    role: StrictStr
    content: StrictStr | list[_Part] | None = None
    tool_calls: list[_ToolCall] | None = None


class _ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    logprobs: StrictBool | None = None
    tools: list[Annotated[dict[str, Any], AfterValidator(check_tool)]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None


class _CompletionBody(_Body):
    prompt: _Text | list[_Text] | list[StrictInt] | list[list[StrictInt]]
    logprobs: Annotated[int, Field(strict=True, ge=0)] | None = None


def read_call(is_chat: bool, body: Any) -> Call:
    """Check the body of a call. Raises ApiError that names the parameter."""
    if not isinstance(body, Mapping):
        raise ApiError(400, f"expected a JSON object, found {type(body).__name__}")
    schema = _ChatBody if is_chat else _CompletionBody
    parameters = _without_switched_off(body, schema)
    try:
        parsed = schema.model_validate(parameters)
    except ValidationError as error:
        raise _unreadable(error) from None
    return _chat_call(parsed) if isinstance(parsed, _ChatBody) else _completion_call(parsed)


def _without_switched_off(body: Mapping[str, Any], schema: type[_Body]) -> dict[str, Any]:
    """The supported parameters of a body. Raises ApiError for others."""
    supported = {}
    for name, value in body.items():
        if value is None or name in _IGNORED:
            continue
        if name in schema.model_fields:
            supported[name] = value
        elif name in _OFF:
            if value not in _OFF[name]:
                logprobs = " (the engine gives the log-prob of the sampled token: logprobs=true)"
                hint = logprobs if name == "top_logprobs" else ""
                fix = f"leave it out, or set it to {json.dumps(_OFF[name][0])}"
                raise unsupported(name, f"{name}={json.dumps(value)[:80]} is not supported{hint}: {fix}")
        else:
            raise unsupported(name, f"the parameter {name!r} is not supported")
    return supported


def _unreadable(error: ValidationError) -> ApiError:
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else None
    location = ".".join(
        str(key) for key in first["loc"] if not str(key).startswith(("constrained", "list[", "function-"))
    )
    if first["type"] == "missing":
        return ApiError(400, f"the parameter {location!r} is missing", param=name, code="missing_parameter")
    value = json.dumps(first["input"], default=str)[:80]
    return ApiError(400, f"{location}: {first['msg']}, found {value}", param=name, code="invalid_value")


def _common(body: _Body) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")
    sampling = {name: value for name in names if (value := getattr(body, name)) is not None}
    if sampling.get("top_k") == 0:  # vLLM's value for "all"
        sampling["top_k"] = -1
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return {
        "model": body.model,
        "n": body.n or 1,
        "sampling": sampling,
        "seed": body.seed,
        "stop": tuple(stop),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "stream": bool(body.stream),
        "include_usage": body.stream_options is not None and body.stream_options.include_usage,
        "return_token_ids": bool(body.return_token_ids),
    }


def _chat_call(body: _ChatBody) -> Call:
    if body.tool_choice not in (None, "auto", "none"):
        choice = json.dumps(body.tool_choice)[:80]
        raise unsupported("tool_choice", f"tool_choice={choice} is not supported: expected auto or none")
    if reserved := sorted(_RESERVED & (body.chat_template_kwargs or {}).keys()):
        raise ApiError(
            400,
            f"chat_template_kwargs: {reserved[0]!r} is not an argument of the chat template: leave it out",
            param="chat_template_kwargs",
            code="invalid_value",
        )
    return Call(
        is_chat=True,
        messages=[_message(message, f"messages.{i}") for i, message in enumerate(body.messages)],
        tools=None if body.tool_choice == "none" else body.tools or None,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=bool(body.logprobs),
        template_kwargs=body.chat_template_kwargs or {},
        call_id=f"chatcmpl-{uuid.uuid4().hex}",
        **_common(body),
    )


def _message(message: _Message, location: str) -> dict[str, Any]:
    """A message as the chat template reads it: its content is text, and arguments of tool calls are objects."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            problem = ""
            if part.type not in ("text", "refusal"):
                problem = f"expected parts with text, found one of type {part.type!r}: the server reads no images"
            elif part.text is None or part.model_extra:
                problem = f"expected a part with type and text, found {', '.join(sorted(part.model_dump()))}"
            if problem:
                raise ApiError(400, f"{location}.content: {problem}", param="messages")
        content = "".join(part.text for part in content)
    extra = {name: value for name, value in (message.model_extra or {}).items() if value not in (None, [])}
    result: dict[str, Any] = {"role": message.role, "content": content or "", **extra}
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return result


def _tool_call(call: _ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": read_call_arguments(call.function.arguments)}
    return {**({"id": call.id} if call.id else {}), "type": "function", "function": function}


def read_call_arguments(arguments: str | dict[str, Any]) -> Any:
    """The arguments of a tool call as an object. A policy may write text that is no JSON, which is returned."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # also of nesting that is too deep, and an integer that is too long
            return json.loads(arguments or "{}")
    return arguments


def _completion_call(body: _CompletionBody) -> Call:
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    if not prompts or not all(prompts):
        raise ApiError(400, "prompt: expected at least one token, found an empty prompt", param="prompt")
    if len(prompts) > MAX_CHOICES:
        raise ApiError(400, f"prompt: expected at most {MAX_CHOICES} prompts, found {len(prompts)}", param="prompt")
    if body.logprobs:
        raise unsupported(
            "logprobs",
            f"logprobs={body.logprobs} is not supported: the engine gives the log-prob of the sampled token, which "
            "logprobs=0 returns",
        )
    return Call(
        is_chat=False,
        prompts=prompts,
        max_tokens=body.max_tokens,
        logprobs=body.logprobs is not None,
        call_id=f"cmpl-{uuid.uuid4().hex}",
        **_common(body),
    )
