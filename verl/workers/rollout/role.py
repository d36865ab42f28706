"""The rollout role within a process: an engine, its weights and its agent loops."""

import dataclasses
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch

from verl.agents.loop import SINGLE_TURN, AgentLoop, GenerateFn, Prompt, Trajectory
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import TrainEngine
from verl.protocol import DataProto
from verl.rollout.base import RolloutEnv, make_rollout_engine
from verl.rollout.request import FILTERS, Completion, Request, SamplingParams, StopStrings, check_completions, media_of
from verl.rollout.routed_experts import routed_experts_column
from verl.utils.coroutines import gather_coroutines, run_coroutine
from verl.utils.rng import fork_seed
from verl.weight_sync import SyncReport, WeightSync, local_sync
from verl.weight_sync.base import SlicedWeights, StoredWeights

if TYPE_CHECKING:
    from verl.workers.rollout.service import FollowingService, GenerationService

#: columns that make up a prompt; the others are passed to the agent loop
_PROMPT_COLUMNS = ("prompt_ids", "sample_index")
_ROUNDING = 1e-2  # by which a log-prob may exceed 0


class Rollout:
    """The rollout engine of one process, its weights and its agent loops.

    Args:
        env: where the engine runs.
        stop_token_ids: token ids that end a response.
        stop: strings that end a response, with the tokenizer's `decode`.
        tokenizer: of the policy, for agent loops.
        train_engine: that of this process, if there is one.
    """

    def __init__(
        self,
        config: schema.RolloutEngineConfig,
        model: schema.ModelConfig,
        env: RolloutEnv,
        *,
        stop_token_ids: tuple[int, ...],
        stop: StopStrings | None = None,
        tokenizer: Any = None,
        train_engine: TrainEngine | None = None,
    ):
        self.config = config
        self.env = env
        self.params = SamplingParams.from_config(config, stop_token_ids=stop_token_ids, stop=stop)
        self.engine = make_rollout_engine(config.name, config, model, env, train_engine)
        self.train_engine = train_engine
        self.is_asleep = False
        self._used_weights = ExitStack()  # of the training engine, if the rollout engine generates with them
        self._uses_weights = False
        self._sync: WeightSync | None = None
        has_loop = isinstance(config, schema.AgentRolloutConfig)
        self.default_loop = config.agent.default_agent_loop if has_loop else SINGLE_TURN[0]
        self.tokenizer = tokenizer
        self._agent_loops: dict[str, AgentLoop] = {}
        if self.default_loop not in SINGLE_TURN:
            self._loop(self.default_loop)

    # ---- weights and memory -------------------------------------------------------------------------------------

    def sync_weights(self, version: int) -> SyncReport:
        """Push the weights of the training engine in this process to the rollout engine."""
        self.wake()
        if self._sync is None:
            self._sync = local_sync(
                self.config.weight_sync,
                self.engine,
                self.env.device,
                dtype=self.env.compute_dtype,
                bucket_bytes=bucket_bytes(self.config),
                has_shards=self.train_engine.shard_layout() is not None,
                prefers_shards=self.train_engine.gathers_one_by_one,
                check_every=self.config.check_every,
            )
        if self.engine.receiver() is None and not self._uses_weights:
            self._used_weights.enter_context(self.train_engine.on_device())
            self._uses_weights = True
        return self._sync.push(self.train_engine, version)

    def has_compared_weights(self) -> bool:
        """Whether the weights of a checked push cannot be old: the engine generates with the trainer's parameters, or
        what it stores was compared with them."""
        receiver = self.engine.receiver()
        return receiver is None or isinstance(receiver, StoredWeights | SlicedWeights)

    def canary_response(self, prompt_ids: list[int], max_tokens: int) -> Completion | None:
        """Generate a greedy response, outside of the statistics. None: the engine does not sample the policy, or this
        is not rank 0 of a tensor-parallel group."""
        if not self.engine.samples_policy:
            return None
        self.wake()
        if self.env.tp_rank > 0:
            return self.engine.follow()
        params = sampling_in_mode(self.params, "greedy", self.config)
        params = dataclasses.replace(params, max_tokens=max_tokens, ignore_eos=True, stop=None)
        requests, stats = [Request(prompt_ids, params, 0)], self.engine.stats
        with self.engine.leading():
            completions = self.engine.generate(requests)
        check_completions(requests, completions)
        self.engine.stats = stats
        return completions[0]

    def sleep(self) -> None:
        """Free all memory of generation. Weights must be synced before the next `generate`."""
        # the weights first: an engine that cannot free its cache alone need not keep them
        if self.train_engine is not None and (receiver := self.engine.receiver()) is not None:
            receiver.release()
        self.free_cache()
        self._used_weights.close()
        self._uses_weights = False

    def free_cache(self) -> None:
        """Free the KV cache if rollout.free_cache_engine is set. The weights are kept."""
        if self.config.free_cache_engine and not self.is_asleep:
            self.engine.sleep()
            self.is_asleep = True

    def wake(self) -> None:
        """Prepare to generate."""
        if self.is_asleep:
            self.engine.wake()
            self.is_asleep = False

    # ---- generating ---------------------------------------------------------------------------------------------

    def generate(self, batch: DataProto, max_over_ranks: Callable[[list[float]], list[float]]) -> DataProto | None:
        """Generate one trajectory per row.

        Only rank 0 of a tensor-parallel group has the responses: it runs the agent loops, and the others follow its
        engine.

        Args:
            batch: columns prompt_ids, uid, sample_index (index of the sample in its group) and those that the agent
                loop reads; meta_info["sampling"] as in `sampling_in_mode`.
            max_over_ranks: maximum over all rollout ranks, so that all ranks pad to the same widths.

        Returns:
            The columns of `build_sequences`, rollout_log_probs (B, T), weight_version (B,), finish_reason and
            trajectory_info. None on the other ranks of a tensor-parallel group.
        """
        start = time.perf_counter()
        self.wake()
        if self.env.tp_rank > 0:
            self.engine.follow()
            max_over_ranks([0.0, 0.0])
            return None
        with self.engine.leading():
            trajectories = self._trajectories(batch)
        with_loops = self.uses_loops(batch.non_tensor_batch)
        seconds = time.perf_counter() - start if with_loops else self.engine.stats.seconds
        responses = self.columns_of(trajectories, max_over_ranks, with_loops)
        metrics = {"rollout/tokens_per_second": (int(responses.batch["response_mask"].sum()), seconds)}
        if drafts := self.engine.stats.drafts:
            metrics["rollout/draft_acceptance"] = (self.engine.stats.accepted, drafts)
        responses.meta_info["metrics"] = metrics | responses.meta_info["metrics"]
        return responses

    def columns_of(
        self,
        trajectories: Sequence[Trajectory],
        max_over_ranks: Callable[[list[float]], list[float]],
        with_loops: bool,
    ) -> DataProto:
        """The columns that `generate` returns, of these trajectories. with_loops: whether agent loops have generated
        them, so that their metrics are reported."""
        prompts = [trajectory.prompt_ids for trajectory in trajectories]
        limit = self.params.max_tokens
        responses = [trajectory.token_ids[:limit] for trajectory in trajectories]
        masks = [trajectory.response_mask[:limit] for trajectory in trajectories]
        widest = [float(max(map(len, prompts))), float(max(map(len, responses)))]
        prompt_width, response_width = (int(width) for width in max_over_ranks(widest))
        widths = {"prompt_width": prompt_width, "response_width": response_width}
        columns = build_sequences(prompts, responses, self.env.pad_token_id, masks, **widths)
        log_probs = torch.zeros(columns["responses"].shape)
        real = columns["attention_mask"][:, prompt_width:].bool()
        log_probs[real] = torch.tensor([p for trajectory in trajectories for p in trajectory.log_probs[:limit]])
        if (wrong := ~(log_probs.isfinite() & (log_probs < _ROUNDING))).any():
            row, token = wrong.nonzero()[0].tolist()
            value = float(log_probs[row, token])
            raise ValueError(f"sample {row}, token {token}: expected a finite log-prob of at most 0, found {value:g}")
        current = self.engine.weight_version
        oldest = [min((version for _, version in t.weight_versions), default=current) for t in trajectories]
        columns |= {"rollout_log_probs": log_probs, "weight_version": torch.tensor(oldest)}
        experts = [trajectory.routed_experts for trajectory in trajectories]
        if any(of_sample is not None for of_sample in experts):
            columns["routed_experts"] = routed_experts_column(
                experts, list(map(len, prompts)), prompt_width, response_width
            )
        reasons = ["length" if len(t) > limit else t.finish_reason for t in trajectories]
        metrics = {}
        objects = {"finish_reason": reasons, "trajectory_info": [t.extra_info for t in trajectories]}
        if with_loops:
            metrics["rollout/turns"] = (sum(t.turns for t in trajectories), len(trajectories))
            for name in dict.fromkeys(name for t in trajectories for name in t.metrics):
                total = sum(t.metrics.get(name, 0.0) for t in trajectories)
                metrics[f"rollout/{name}"] = (total, len(trajectories))
        return DataProto.from_dict(columns, objects, {"metrics": metrics})

    def _trajectories(self, batch: DataProto) -> list[Trajectory]:
        mode = batch.meta_info["sampling"]
        prompts = self.prompts_of(batch, sampling_in_mode(self.params, mode, self.config))
        if not self.uses_loops(batch.non_tensor_batch):
            return self._single_turns(prompts)
        return run_coroutine(gather_coroutines([self._run_loop(prompt, self._generate_one) for prompt in prompts]))

    def uses_loops(self, columns: Container[str]) -> bool:
        """Whether samples with these columns are generated by agent loops. The same on all ranks."""
        return self.default_loop not in SINGLE_TURN or "agent_name" in columns

    def _loop(self, name: str) -> AgentLoop:
        if name not in self._agent_loops:
            from verl.agents.public import make_agent_loop  # imports the tools

            self._agent_loops[name] = make_agent_loop(name, self.config, self.tokenizer)
        return self._agent_loops[name]

    def serve(self, pause_limit: float) -> "GenerationService | FollowingService":
        """Generate in the background, with the sampling parameters of training, or follow rank 0 of the
        tensor-parallel group. Paused until `resume`. pause_limit: seconds that a pause may take."""
        from verl.workers.rollout.service import FollowingService, GenerationService

        self.wake()
        if self.env.tp_rank > 0:
            return FollowingService(self.engine, self.env.device, pause_limit)
        return GenerationService(self.engine, self._generate_one, self._run_loop, self.env.device, pause_limit)

    async def _run_loop(self, prompt: Prompt, generate: GenerateFn) -> Trajectory:
        """Run the agent loop for one prompt. Raises ValueError unless it returns a trajectory of that prompt."""
        loop = self._loop(prompt.columns.get("agent_name") or self.default_loop)
        name, token_ids = f"the agent loop {type(loop).__name__}", tuple(prompt.token_ids)
        trajectory = await loop.run(prompt, generate)
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"{name}: expected run() to return a Trajectory, found {type(trajectory).__name__}")
        if trajectory.prompt is not prompt or tuple(prompt.token_ids) != token_ids:
            raise ValueError(f"{name}: expected a Trajectory of the prompt that run() was given, found another prompt")
        if not len(trajectory):
            raise ValueError(f"{name}: expected at least one token, found an empty trajectory")
        return trajectory

    async def _generate_one(self, request: Request) -> Completion:
        completion = await self.engine.generate_one(request)
        check_completions([request], [completion])
        return completion

    def prompts_of(self, batch: DataProto, params: SamplingParams) -> list[Prompt]:
        """The prompt of each row, to be sampled with these parameters."""
        others = {name: values for name, values in batch.non_tensor_batch.items() if name not in _PROMPT_COLUMNS}
        every = zip(batch.non_tensor_batch["prompt_ids"], sample_ids(batch))
        return [
            Prompt(list(ids), params, sample_id, {name: values[row] for name, values in others.items()})
            for row, (ids, sample_id) in enumerate(every)
        ]

    def _single_turns(self, prompts: Sequence[Prompt]) -> list[Trajectory]:
        """Generate all responses in one call of the engine."""
        requests = [
            Request(prompt.token_ids, prompt.params, prompt.sample_id, **media_of(prompt.columns)) for prompt in prompts
        ]
        trajectories = []
        completions = self.engine.generate(requests)
        check_completions(requests, completions)
        for prompt, completion in zip(prompts, completions):
            trajectories.append(Trajectory(prompt))
            trajectories[-1].add_completion(completion)
        return trajectories


def sampling_in_mode(
    params: SamplingParams, mode: str | Mapping[str, Any], config: schema.RolloutEngineConfig
) -> SamplingParams:
    """Sampling parameters of a mode: "train", "greedy" (the same, with temperature 0) or "validate"
    (`rollout.val_kwargs`); or those of training with other values."""
    if isinstance(mode, Mapping):
        return dataclasses.replace(params, **mode)
    if mode == "train":
        return params
    if mode == "greedy":
        return dataclasses.replace(params, temperature=0.0, **FILTERS)
    assert mode == "validate" and isinstance(config, schema.RolloutConfig), mode
    val = config.val_kwargs
    filters = {name: getattr(val, name, off) for name, off in FILTERS.items()}
    return dataclasses.replace(params, temperature=val.temperature if val.do_sample else 0.0, **filters)


def bucket_bytes(config: schema.RolloutConfig) -> int:
    """Size of a bucket of the weight sync."""
    return config.checkpoint_engine.update_weights_bucket_megabytes * 2**20


def sample_ids(batch: DataProto) -> list[int]:
    """The sample id of each row, a hash of its uid and sample index: determines its random numbers."""
    rows = zip(batch.non_tensor_batch["uid"], batch.non_tensor_batch["sample_index"])
    return [fork_seed(str(uid), int(index)) for uid, index in rows]
