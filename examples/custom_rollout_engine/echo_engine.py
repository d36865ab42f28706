"""A custom rollout engine, complete: it responds to every prompt with the prompt itself.

    python -m verl.trainer.main_ppo imports=[examples/custom_rollout_engine/echo_engine.py] \\
        actor_rollout_ref.rollout.name=echo ...

An engine receives token ids and sampling parameters and returns token ids and log-probs. Replace `generate` by a call
to a server, a library or a model of your own; define `async generate_one` instead if it serves single requests. An
engine that keeps its own copy of the weights also returns a `WeightReceiver` from `receiver()`, whose `receive` is
called with all parameters after each update.
"""

import time
from collections.abc import Sequence

from verl.rollout import Completion, Request, RolloutEngine, RolloutStats, register_rollout_engine


class EchoEngine(RolloutEngine):
    """The response is the prompt, up to `max_tokens`, then a stop token if there is room for it."""

    samples_policy = False

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        start = time.perf_counter()
        completions = [self._echo(request) for request in requests]
        tokens = sum(len(completion.token_ids) for completion in completions)
        self.stats = RolloutStats(tokens=tokens, seconds=time.perf_counter() - start)
        return completions

    def _echo(self, request: Request) -> Completion:
        params = request.params
        token_ids = [*request.prompt_ids, *params.stop_token_ids[:1]][: params.max_tokens]
        reason = "stop" if len(token_ids) > len(request.prompt_ids) else "length"
        # no chance is involved, so every token has probability 1
        return Completion(token_ids, [0.0] * len(token_ids), reason)


@register_rollout_engine("echo")
def make_echo(config, model, env, train_engine=None) -> EchoEngine:
    """
    Args:
        config: the section `actor_rollout_ref.rollout`.
        model: the section `actor_rollout_ref.model`.
        env: rank, world_size, local_rank, device and pad_token_id of this process.
        train_engine: the training engine in this process; None where the rollout has separate devices.
    """
    return EchoEngine()
