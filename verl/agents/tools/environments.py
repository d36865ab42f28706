"""Environments as interactions: objects with reset and step, such as those of gymnasium and clients of OpenEnv.

None of these packages is imported here. reset and step may be async. A step returns (observation, reward, terminated,
truncated, info), (observation, reward, done, info), or an object with observation, reward and done (OpenEnv). Every
trajectory has an object; one that is a context manager, such as an OpenEnv client, is entered for the trajectory.
"""

import asyncio
import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from verl.agents.tools.base_tool import BaseInteraction
from verl.agents.tools.schemas import result_text

Reply = tuple[bool, str, float | None, dict[str, Any]]


class Environment(BaseInteraction):
    """An environment as an interaction. Its first observation is a part of the prompt.

    Args:
        config: arguments of `make`, `name`, and optional `action`: the names of a discrete action space, of which the
            last one in a turn is taken as its index; or a function from the text of a turn to the action. By default
            the text is the action.
        make: makes the environment.
    """

    def __init__(self, config: dict[str, Any], make: Callable[..., Any]):
        super().__init__(config)
        action = config.get("action")
        self._arguments = {key: value for key, value in config.items() if key not in ("name", "action")}
        self._make = make
        self._action = action if callable(action) or action is None else _index_among(action)
        self._episodes: dict[str, _Episode] = {}

    async def start_interaction(self, instance_id: str, default_seed: int = 0, **kwargs: Any) -> str:
        """Make and reset the environment of a trajectory. Returns the first observation.

        kwargs: arguments of `reset`. default_seed: passed as its `seed` if it has one and kwargs have none.
        """
        env = await _call(self._make, **self._arguments)
        for name in ("reset", "step"):
            if not callable(getattr(env, name, None)):
                raise TypeError(f"environment {self.name}: expected an object with reset and step, found {env!r:.80}")
        episode = self._episodes[instance_id] = _Episode(env, self._action)
        return await episode.reset(default_seed, kwargs)

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Reply:
        """Take a step with the last turn of the policy."""
        return await self._episodes[instance_id].step(messages)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Close the environment of a trajectory."""
        if (episode := self._episodes.pop(instance_id, None)) is not None:
            await episode.close()


class _Episode:
    """One trajectory of an environment with reset and step."""

    def __init__(self, env: Any, action: Callable[[str], Any] | None):
        self.env, self.action = env, action
        self.is_entered = False

    async def reset(self, default_seed: int, kwargs: dict[str, Any]) -> str:
        enter = getattr(self.env, "__aenter__", None) or getattr(self.env, "__enter__", None)
        if enter is not None:
            entered = await _call(enter)
            self.env, self.is_entered = self.env if entered is None else entered, True
        if "seed" in inspect.signature(self.env.reset).parameters:
            kwargs = {"seed": default_seed, **kwargs}
        result = await _call(self.env.reset, **kwargs)
        if isinstance(result, tuple) and len(result) == 2:
            result = result[0]
        return await self._text(getattr(result, "observation", result))

    async def step(self, messages: list[dict[str, Any]]) -> Reply:
        text = messages[-1]["content"]
        try:
            action = text if self.action is None else self.action(text)
        except ValueError as error:  # the policy wrote no action; the environment does not move
            return False, str(error), 0.0, {}
        result = await _call(self.env.step, action)
        match result:
            case (observation, reward, terminated, truncated, _):
                ends = terminated or truncated
            case (observation, reward, ends, _):
                pass
            case _ if hasattr(result, "observation"):
                observation, reward, ends = result.observation, result.reward, result.done
            case _:
                raise TypeError(f"expected step to return (observation, reward, ...), found {result!r:.100}")
        return bool(ends), await self._text(observation), 0.0 if reward is None else reward, {}

    async def close(self) -> None:
        leave = getattr(self.env, "__aexit__", None) or getattr(self.env, "__exit__", None)
        if self.is_entered and leave is not None:
            await _call(leave, None, None, None)
        elif hasattr(self.env, "close"):
            await _call(self.env.close)

    async def _text(self, observation: Any) -> str:
        if not isinstance(observation, str) and getattr(self.env, "render_mode", None) == "ansi":
            observation = await _call(self.env.render)
        if hasattr(observation, "model_dump"):
            observation = observation.model_dump()
        elif dataclasses.is_dataclass(observation):
            observation = dataclasses.asdict(observation)
        return result_text(observation)


def _index_among(names: Sequence[str]) -> Callable[[str], int]:
    """A function from text to the index of the name that occurs last in it as a word."""
    pattern = re.compile(rf"(?i)\b({'|'.join(map(re.escape, names))})\b")
    indices = {name.lower(): index for index, name in enumerate(names)}

    def action(text: str) -> int:
        named = pattern.findall(text)
        if not named:
            raise ValueError(f"expected one of the actions {', '.join(names)}")
        return indices[named[-1].lower()]

    return action


async def _call(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """The result of a function that may be async; a plain one runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await asyncio.to_thread(function, *args, **kwargs)
    return await value if inspect.isawaitable(value) else value
