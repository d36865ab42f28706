"""The agent loop `server_agent` (`rollout.mode=server`): trains agents that call the policy over HTTP.

The server runs in the rollout process, on the loopback interface. Every sample has its own base URL, whose calls are
joined into the trajectory of the sample (see `episodes`).
"""

import asyncio
import logging
import secrets
from typing import Any

from pydantic import BaseModel

from verl.agents.loop import GenerateFn, Prompt, Trajectory
from verl.rollout.request import SamplingParams
from verl.server.agents import load_agent, read_result
from verl.server.app import make_app
from verl.server.episodes import Episode, StepGenerator
from verl.server.http import ServerThread
from verl.server.protocol import ApiError
from verl.server.service import ServedModel
from verl.utils.coroutines import GENERATION_CLOCK, wait_within
from verl.utils.rendezvous import bypass_proxies

logger = logging.getLogger("verl.server")

#: a run is stopped if this many agents have failed before any got a response
_FAILED_AT_START = 16


class ServerAgentLoop:
    """Runs the agent of `rollout.server.agent` once per sample.

    Raises:
        ValueError: there is no agent, or the tokenizer has no chat template.
    """

    def __init__(self, config: BaseModel, tokenizer: Any):
        if tokenizer.chat_template is None:
            raise ValueError(
                "rollout.mode=server needs a chat template, which the tokenizer does not have: use the tokenizer of an "
                "instruction-tuned model, or set actor_rollout_ref.model.custom_chat_template"
            )
        bypass_proxies()  # of the agent's client, for scripts that build a trainer themselves
        self.config, self.settings = config, config.server
        self.agent = load_agent(self.settings.agent)
        self.api_key = secrets.token_urlsafe(24)
        self.model = ServedModel(
            name=self.settings.model_name,
            tokenizer=tokenizer,
            params=SamplingParams(config.response_length, ()),
            vocab_size=len(tokenizer),
            max_model_len=config.prompt_length + config.response_length,
            tool_parser=config.multi_turn.format,
        )
        self.episodes: dict[str, Episode] = {}
        self.server = ServerThread(make_app(self.model, self.api_key, find_episode=self._find))
        logger.info("agents call the policy at %s", self.server.url)
        self._slots: dict[asyncio.AbstractEventLoop, asyncio.Semaphore] = {}
        self._failures, self._has_worked = 0, False

    def _find(self, episode_id: str) -> Episode:
        """The running episode with this id. Called in the server's thread."""
        episode = self.episodes.get(episode_id)
        if episode is None:
            raise ApiError(410, f"there is no running episode {episode_id!r}", code="episode_over")
        return episode

    async def run(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        """See `AgentLoop.run`. Raises the error of the engine, if it fails."""
        async with self._slot():
            loop, episode_id = asyncio.get_running_loop(), secrets.token_urlsafe(12)
            generator = StepGenerator(generate, loop)
            limit, on_new = self.config.prompt_length, self.settings.on_new_conversation
            episode = Episode(prompt, generator, self.model, limit, on_new)
            self.episodes[episode_id] = episode
            try:
                info, metrics = await self._run_agent(episode, f"{self.server.url}/episodes/{episode_id}/v1")
            finally:
                del self.episodes[episode_id]
                trajectory = episode.close()
        if generator.error is not None:
            raise generator.error
        self._check_start(episode, info)
        if trajectory is None:
            trajectory = self._empty(prompt)
        trajectory.info = info | {"num_turns": trajectory.turns + trajectory.user_turns + 1}
        trajectory.metrics = metrics | {
            "agent_empty": float(not trajectory.turns),
            "agent_out_of_tokens": float(episode.is_full or len(trajectory) >= prompt.params.max_tokens),
        }
        return trajectory

    def _slot(self) -> asyncio.Semaphore:
        """Limits the agents of the running event loop. Every step has a new loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._slots:
            self._slots = {known: slot for known, slot in self._slots.items() if not known.is_closed()}
            self._slots[loop] = asyncio.Semaphore(self.settings.max_concurrency)
        return self._slots[loop]

    async def _run_agent(self, episode: Episode, base_url: str) -> tuple[dict[str, Any], dict[str, float]]:
        """Run the agent. Returns entries of extra_info for the reward function, and metrics.

        `agent_failure` is among the entries of an agent that failed; the operator `gen` logs it (`check_failures`).
        """
        metrics = {"agent_errors": 0.0, "agent_timeouts": 0.0}
        started = self.agent(dict(episode.prompt.columns), base_url, self.api_key, self.model.name)
        future, returned = asyncio.wrap_future(started), False
        try:
            result = await wait_within(future, self.settings.timeout, GENERATION_CLOCK.get())
            returned = True
            score, values = read_result(result)
            return {"agent_score": score, "agent_error": None, "agent_info": values}, metrics
        except TimeoutError:
            metrics["agent_timeouts"] = 1.0
            error = f"the time limit of {self.settings.timeout:g} s (rollout.server.timeout) was exceeded"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            # an agent that raises because the response length is used up has not failed
            metrics["agent_errors"] = float(returned or not episode.is_full)
        info = {"agent_score": self.settings.failure_score, "agent_error": error, "agent_info": {}}
        if any(metrics.values()):
            self._failures += 1
            error = f"after {episode.calls} call{'s' * (episode.calls != 1)} of the policy: {error}"
            logger.debug("an agent failed %s", error)
            info["agent_failure"] = error
        return info, metrics

    def _check_start(self, episode: Episode, info: dict[str, Any]) -> None:
        """Raise ValueError if agents fail before any got a response: the agent cannot work."""
        self._has_worked |= episode.calls > 0 or info["agent_error"] is None
        if not self._has_worked and self._failures >= _FAILED_AT_START:
            raise ValueError(
                f"rollout.server.agent: {self._failures} agents failed before any got a response from the policy; the "
                f"last one: {info['agent_error']}"
            )

    def _empty(self, prompt: Prompt) -> Trajectory:
        """The trajectory of an agent that got no response: one end token, which the policy is not trained on."""
        trajectory = Trajectory(prompt)
        end_tokens = prompt.params.stop_token_ids or (self.model.tokenizer.eos_token_id,)
        trajectory.add_tokens([end_tokens[0]], author="server")
        trajectory.finish_reason = "abort"
        return trajectory
