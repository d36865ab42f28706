"""The parameters of a call of the HTTP server, and its errors, in the form of OpenAI's API.

A parameter that would change the result and is not supported is an error; it is accepted with the value that disables
it.
"""

import json
import logging
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)

from verl.agents.tools.schemas import check_tool

logger = logging.getLogger("verl.server")

#: choices per prompt, and prompts per call
MAX_CHOICES = 128
#: log-probs of the most probable tokens per token of a response, and of a prompt
MAX_TOP_LOGPROBS, MAX_PROMPT_LOGPROBS = 20, 1024

#: parameters that concern accounts, caches or speed, and do not change the result
_IGNORED = {"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_IGNORED |= {"service_tier", "prediction", "priority", "cache_salt", "request_id"}
#: the same in messages and in parts of their content
_IGNORED_IN_MESSAGES = {"cache_control", "prompt_cache_breakpoint", "annotations"}
#: names of `_IGNORED` that a note was logged for
_noted: set[str] = set()
#: parameters that are accepted only with a value that disables them; null always does
_OFF: dict[str, Any] = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "length_penalty": 1}
_OFF |= {"logit_bias": {}, "bad_words": [], "logits_processors": [], "vllm_xargs": {}, "min_tokens": 0, "best_of": 1}
_OFF |= {"response_format": {"type": "text"}, "modalities": ["text"], "verbosity": "medium", "suffix": ""}
_OFF |= {"use_beam_search": False, "early_stopping": False, "include_stop_str_in_output": False, "detokenize": True}
_OFF |= {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_reasoning": True}
_OFF |= {"add_generation_prompt": True, "continue_final_message": False, "return_tokens_as_token_ids": False}
_OFF |= {"functions": [], "function_call": "none"}
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


def too_long(message: str, param: str = "messages") -> ApiError:
    """The error of a prompt that leaves no room for a response."""
    return ApiError(400, message, param=param, code="context_length_exceeded")


def invalid(param: str | None, message: str) -> ApiError:
    """The error of a value that is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


# ---- what a body may contain ----------------------------------------------------------------------------------------

_Number = Annotated[float, Field(strict=True)]
_Text = Annotated[str, Field(strict=True, min_length=1)]
_Count = Annotated[int, Field(strict=True, ge=1)]
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "ignore_eos")


def _read_stop(stop: Any) -> Any:
    """A list; "" is no stop string."""
    return stop if not isinstance(stop, str) else [stop] if stop else []


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # without effect: chunks are not padded
    continuous_usage_stats: Literal[False] = False


class Call(BaseModel):
    """The parameters of /chat/completions and of /completions.

    Attributes:
        is_chat: whether it is a call of /chat/completions.
        n: choices per prompt.
        max_tokens: maximum response length; None: the server's default; 0: only the prompt, with `echo`.
        seed: determines the random numbers; None: a new seed.
        stop, stop_token_ids: strings and tokens that end a response, in addition to the model's end tokens.
        return_token_ids: return the token ids of prompt and response.
        logprobs: not None: return the log-prob of each sampled token.
        top_logprobs: also those of the most probable tokens in its place.
        prompt_logprobs: return log-probs of the tokens of the prompt and of this many in the place of each.
    """

    model_config = ConfigDict(extra="forbid")
    is_chat: ClassVar[bool]

    model: StrictStr
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] = 1
    max_tokens: _Count | None = None
    temperature: Annotated[_Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[_Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1)] | None = None
    min_p: Annotated[_Number, Field(ge=0, le=1)] | None = None
    ignore_eos: StrictBool | None = None
    seed: Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[_Text], BeforeValidator(_read_stop)] = []
    stop_token_ids: list[Annotated[int, Field(strict=True, ge=0)]] = []
    stream: StrictBool = False
    stream_options: _StreamOptions = _StreamOptions()
    return_token_ids: StrictBool = False
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_PROMPT_LOGPROBS)] | None = None

    @property
    def scores(self) -> dict[str, int]:
        """The log-probs that are asked for beside those of the sampled tokens, by their names in `SamplingParams`."""
        top, prompt = self.top_logprobs, self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt = max(top, prompt or 0)
        return ({"top_logprobs": top} if top else {}) | ({} if prompt is None else {"prompt_logprobs": prompt})

    @model_validator(mode="after")
    def _check_scores(self) -> "Call":
        name = "prompt_logprobs" if self.prompt_logprobs is not None else "echo"
        if self.stream and "prompt_logprobs" in self.scores:
            raise unsupported(name, f"{name}: log-probs of the prompt are not supported with stream=true: use false")
        return self

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that were given, by their names in `SamplingParams`."""
        values = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return values | ({"top_k": -1} if self.top_k == 0 else {})  # vLLM's value for "all"

    @cached_property
    def call_id(self) -> str:
        """Identifies the call."""
        return f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"


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


def _read_messages(messages: list[_Message]) -> list[dict[str, Any]]:
    return [_message(message, f"messages.{i}") for i, message in enumerate(messages)]


class ChatCall(Call):
    """A call of /chat/completions. Message contents are text; `arguments` of tool calls are parsed."""

    is_chat = True
    echo: ClassVar[bool] = False

    messages: Annotated[list[_Message], Field(min_length=1), AfterValidator(_read_messages)]
    max_completion_tokens: _Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] = 0
    tools: list[Annotated[dict[str, Any], AfterValidator(check_tool)]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool = True
    reasoning_effort: StrictStr | None = None
    template_kwargs: dict[str, Any] = Field({}, alias="chat_template_kwargs")

    @model_validator(mode="after")
    def _check(self) -> "ChatCall":
        if self.tool_choice not in (None, "auto", "none"):
            choice = json.dumps(self.tool_choice)[:80]
            raise unsupported("tool_choice", f"tool_choice={choice} is not supported: expected auto or none")
        if reserved := sorted(_RESERVED & self.template_kwargs.keys()):
            problem = f"{reserved[0]!r} is not an argument of the chat template: leave it out"
            raise invalid("chat_template_kwargs", f"chat_template_kwargs: {problem}")
        if self.reasoning_effort is not None:  # templates with levels of reasoning read it
            self.template_kwargs = {"reasoning_effort": self.reasoning_effort} | self.template_kwargs
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", f"top_logprobs needs logprobs=true, found {json.dumps(self.logprobs)}")
        self.logprobs = self.logprobs or None
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        self.tools = None if self.tool_choice == "none" else self.tools or None
        return self


class CompletionCall(Call):
    """A call of /completions.

    Attributes:
        prompts: texts or token ids.
        echo: the text starts with the prompt.
        logprobs: the number of most probable tokens; 0: `top_logprobs` is null.
    """

    is_chat = False
    tools: ClassVar[None] = None

    echo: StrictBool = False
    max_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None

    prompt: _Text | list[_Text] | list[StrictInt] | list[list[StrictInt]]
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def top_logprobs(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        is_one = isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else self.prompt

    @model_validator(mode="after")
    def _check(self) -> "CompletionCall":
        if not self.prompts or not all(self.prompts):
            raise ApiError(400, "prompt: expected at least one token, found an empty prompt", param="prompt")
        if (count := len(self.prompts)) > MAX_CHOICES:
            raise ApiError(400, f"prompt: expected at most {MAX_CHOICES} prompts, found {count}", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "max_tokens=0 needs echo=true, found false: nothing would be returned")
        return self


def read_call(is_chat: bool, body: Any) -> Call:
    """Check the body of a call. Raises ApiError that names the parameter."""
    if not isinstance(body, Mapping):
        raise ApiError(400, f"expected a JSON object, found {type(body).__name__}")
    schema = ChatCall if is_chat else CompletionCall
    try:
        return schema.model_validate(_without_switched_off(body, schema))
    except ValidationError as error:
        raise _unreadable(error) from None


def _without_switched_off(body: Mapping[str, Any], schema: type[Call]) -> dict[str, Any]:
    """The supported parameters of a body. Raises ApiError for others."""
    supported, names = {}, {field.alias or name for name, field in schema.model_fields.items()}
    for name, value in body.items():
        if value is None or name in _IGNORED:
            if value is not None and name not in _noted:
                _noted.add(name)
                logger.info("the parameter %r of a call has no effect here", name)
            continue
        if name in names:
            supported[name] = value
        elif name in _OFF:
            if value != _OFF[name]:
                fix = f"leave it out, or set it to {json.dumps(_OFF[name])}"
                raise unsupported(name, f"{name}={json.dumps(value)[:80]} is not supported: {fix}")
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
    return invalid(name, f"{location}: {first['msg']}, found {value}")


def _message(message: _Message, location: str) -> dict[str, Any]:
    """A message as the chat template reads it: its content is text, and arguments of tool calls are objects."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            problem = ""
            if part.type not in ("text", "refusal"):
                problem = f"expected parts with text, found one of type {part.type!r}: the server reads no images"
            elif part.text is None or (part.model_extra or {}).keys() - _IGNORED_IN_MESSAGES:
                problem = f"expected a part with type and text, found {', '.join(sorted(part.model_dump()))}"
            if problem:
                raise ApiError(400, f"{location}.content: {problem}", param="messages")
        content = "".join(part.text for part in content)
    extra = {name: value for name, value in (message.model_extra or {}).items() if value not in (None, [])}
    extra = {name: value for name, value in extra.items() if name not in _IGNORED_IN_MESSAGES}
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
