"""Episodes: the calls of one run of an agent, joined into a trajectory.

A call whose messages extend the conversation so far continues an append-only token list: only what the chat template
puts between two turns is tokenized, and sampled tokens are never rendered and tokenized again.
"""

import asyncio
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from verl.agents.chat import ChatContinuation
from verl.agents.loop import GenerateFn, Prompt, Trajectory, log_ignored_sampling
from verl.rollout.request import Completion, Request
from verl.server.protocol import ApiError, Call, read_call_arguments, too_long, unsupported
from verl.server.service import Choice, Generator, ServedModel
from verl.utils.rng import fork_seed

#: "error": reject a call that does not extend the conversation; otherwise which of several trajectories is trained
NewConversation = Literal["error", "last", "longest"]

Message = Mapping[str, Any]


class StepGenerator(Generator):
    """The `generate` of an agent loop, for callers in another event loop: a request is cancelled with its caller."""

    weight_version = None

    def __init__(self, generate: GenerateFn, loop: asyncio.AbstractEventLoop):
        self._generate, self._loop = generate, loop
        self._tasks: set[asyncio.Task] = set()
        # the first error of the engine. It ends the run; an agent would report it as its own.
        self.error: Exception | None = None

    async def generate(self, request: Request) -> Completion:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._run(request), self._loop))

    async def _run(self, request: Request) -> Completion:
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            return await self._generate(request)
        except Exception as error:
            self.error = self.error or error
            raise
        finally:
            self._tasks.discard(task)

    def cancel(self) -> None:
        """Cancel all requests. Called in the event loop of the agent loops."""
        for task in list(self._tasks):
            task.cancel()


class _Conversation:
    """One trajectory and its messages. call: its first call."""

    def __init__(self, call: Call, trajectory: Trajectory, tokenizer: Any):
        self.trajectory = trajectory
        self.messages: list[dict[str, Any]] = list(call.messages)
        self.settings = {"tools": call.tools, "chat_template_kwargs": call.template_kwargs}
        self.template = ChatContinuation(tokenizer, call.tools or (), call.template_kwargs)
        self.last_turn: list[int] = []  # its token ids

    def difference(self, call: Call) -> str | None:
        """Why a call does not extend the conversation; None if it does."""
        for name, value in (("tools", call.tools), ("chat_template_kwargs", call.template_kwargs)):
            if value != self.settings[name]:
                return f"{name} differ from those of the first call"
        for i, (expected, message) in enumerate(zip(self.messages, call.messages)):
            if comparable(expected) != comparable(message):
                return f"messages.{i} differs: expected {_format_message(expected)}, found {_format_message(message)}"
        if len(call.messages) <= len(self.messages):
            return f"expected more than the {len(self.messages)} messages so far, found {len(call.messages)}"
        return None

    def added_tokens(self, call: Call) -> list[int]:
        """The tokens between the last turn and the next one."""
        stops = self.trajectory.prompt.params.stop_token_ids
        return self.template.next_tokens(self.last_turn, stops, call.messages[len(self.messages) :])


@dataclass
class _Pending:
    """A call that is running."""

    conversation: _Conversation  # the one that it continues or starts
    added: list[int]  # tokens that precede its response
    author: str  # role of the first new message


class Episode:
    """The calls of one episode (a `Conversation` of the server).

    Its methods are called in the server's thread, and `close` in that of the agent loops.

    Args:
        prompt_length: maximum length of the first prompt.
        on_new: see `NewConversation`.
    """

    def __init__(
        self, prompt: Prompt, generator: StepGenerator, model: ServedModel, prompt_length: int, on_new: NewConversation
    ):
        self.prompt, self.generator, self.model = prompt, generator, model
        self.prompt_length, self.on_new = prompt_length, on_new
        self.conversations: list[_Conversation] = []
        self.calls = 0
        self.is_full = False  # a call was rejected because the response length is used up
        self._pending: _Pending | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    # ---- the server ---------------------------------------------------------------------------------------------

    def requests(self, call: Call) -> list[Request]:
        with self._lock:
            if self._is_closed:
                raise ApiError(410, "the episode is over", code="episode_over")
            if self._pending is not None:
                raise ApiError(409, "another call of this episode is running: wait for it", code="episode_busy")
            if call.n > 1:
                raise unsupported("n", "n: expected 1 within an episode")
            if call.prompt_logprobs is not None:
                raise unsupported("prompt_logprobs", "prompt_logprobs is not supported within an episode")
            sampling = call.sampling | {"seed": call.seed}
            log_ignored_sampling(sampling, {name: getattr(self.prompt.params, name) for name in sampling})
            pending = self._continue(call)
            request = self._request(call, pending)
            self._pending = pending
            return [request]

    def complete(self, call: Call, choices: list[Choice]) -> None:
        with self._lock:
            if self._is_closed or self._pending is None:
                raise ApiError(410, "the episode is over", code="episode_over")
            pending, (choice,) = self._pending, choices
            conversation, completion = pending.conversation, choice.completion
            if conversation not in self.conversations:
                self.conversations.append(conversation)
            if pending.added:
                conversation.trajectory.add_tokens(pending.added, pending.author)
                conversation.trajectory.user_turns += 1
            conversation.trajectory.add_completion(completion)
            conversation.last_turn = completion.token_ids
            conversation.messages = [*call.messages, choice.message]
            self.calls += 1
            self._pending = None

    def release(self) -> None:
        with self._lock:
            self._pending = None

    def _continue(self, call: Call) -> _Pending:
        """The conversation that a call continues or starts."""
        if self.conversations:
            conversation = self.conversations[-1]
            difference = conversation.difference(call)
            if difference is None:
                try:
                    added = conversation.added_tokens(call)
                except ValueError as error:
                    raise ApiError(400, str(error), param="messages") from error
                return _Pending(conversation, added, call.messages[len(conversation.messages)]["role"])
            if self.on_new == "error":
                raise ApiError(
                    409,
                    f"the call does not continue the conversation of its episode: {difference}. Append messages only, "
                    "or set rollout.server.on_new_conversation to last or longest",
                    param="messages",
                    code="conversation_changed",
                )
        ids = self.model.encode_chat(call)
        if len(ids) > self.prompt_length:
            raise too_long(
                f"the first prompt of the conversation has {len(ids)} tokens: expected at most {self.prompt_length} "
                "(data.max_prompt_length)"
            )
        return _Pending(_Conversation(call, Trajectory(self.prompt, ids), self.model.tokenizer), [], "user")

    def _request(self, call: Call, pending: _Pending) -> Request:
        trajectory = pending.conversation.trajectory
        remaining = self.prompt.params.max_tokens - len(trajectory) - len(pending.added)
        if remaining < 1:
            self.is_full = True
            trajectory.finish_reason = "length"
            raise too_long(
                f"the responses and messages of the episode have reached {self.prompt.params.max_tokens} tokens "
                "(data.max_response_length)"
            )
        request = trajectory.next_request()
        params = replace(request.params, max_tokens=min(remaining, call.max_tokens or remaining), **call.scores)
        params = self.model.with_stops(call, params)
        # conversations of one episode must not have the same random numbers
        index = len(self.conversations) - (pending.conversation in self.conversations)
        sample_id = request.sample_id if index == 0 else fork_seed(request.sample_id, "conversation", index)
        return replace(request, prompt_ids=request.prompt_ids + pending.added, params=params, sample_id=sample_id)

    # ---- the agent loop -----------------------------------------------------------------------------------------

    def close(self) -> Trajectory | None:
        """End the episode. Returns its trajectory; None if nothing was sampled."""
        with self._lock:
            self._is_closed = True
        self.generator.cancel()
        if not self.conversations:
            return None
        if self.on_new == "longest":
            return max(self.conversations, key=lambda c: sum(c.trajectory.response_mask)).trajectory
        return self.conversations[-1].trajectory


def comparable(message: Message) -> dict[str, Any]:
    """The part of a message that is compared with another one.

    Of an assistant message: its content without leading and trailing white space, which agents often strip, and the
    names and arguments of its tool calls.
    """
    if message["role"] != "assistant":
        return dict(message)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "role": "assistant",
        "content": (message.get("content") or "").strip(),
        "tool_calls": [(function["name"], read_call_arguments(function["arguments"])) for function in calls],
    }


def _format_message(message: Message) -> str:
    text = json.dumps({name: message[name] for name in ("role", "content", "tool_calls") if message.get(name)})
    return text if len(text) <= 200 else f"{text[:200]} ..."
