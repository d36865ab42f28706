"""The vLLM rollout engine: vLLM's engine in this process, with the contract of `verl.rollout.base.RolloutEngine`."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from verl.rollout.checks import unexpanded_prompt
from verl.rollout.engine_copy import CopyRollout, EngineCopy, EngineMemory
from verl.rollout.request import Completion, Request
from verl.rollout.vllm.stepping import Channel, Job, Stepper
from verl.rollout.vllm.weights import VllmReceiver
from verl.utils.rng import fork_seed

#: vLLM raises lower temperatures to this one
MIN_TEMPERATURE = 0.01


class VllmRollout(CopyRollout):
    """Generates with vLLM (Kwon et al. 2023, arXiv 2309.06180). All ranks of a group take the same steps.

    Log-probs are those of the distribution that was sampled from (vLLM's `processed_logprobs`): after temperature,
    min-p, top-k and top-p, in float32; of the unscaled distribution when greedy. vLLM applies min-p before top-k and
    top-p, and `native` after them.

    Random numbers of a response depend only on its seed and sample id, but they are vLLM's: other engines sample other
    tokens.

    Args:
        llm: a `vllm.LLM`.
        copy: the model.
        sleeps: whether vLLM's sleep mode is on.
        device: device of the engine.
        channel: to the other ranks of the tensor-parallel group; None without them.
        recorded_layers: the layers with experts, if completions have `routed_experts`.
    """

    def __init__(
        self,
        llm: Any,
        *,
        copy: EngineCopy,
        sleeps: bool,
        device: torch.device,
        channel: Channel | None = None,
        recorded_layers: list[int] | None = None,
    ):
        self.llm = llm
        self.device = device
        self.stepper = Stepper(
            llm.llm_engine,
            self._sampling,
            self._prepare,
            lambda: self.weight_version,
            channel,
            recorded_layers,
        )
        super().__init__(copy, self.stepper, VllmMemory(llm, sleeps))
        self._receiver = VllmReceiver(self, copy.shapes, filled=copy.reads_files)

    @property
    def steps(self) -> int:
        return self.stepper.steps

    def submit(self, requests: Sequence[Request], is_batch: bool) -> "list[Future[Completion]]":
        jobs = [Job(request, not is_batch or request.params.stop is not None) for request in requests]
        self.stepper.submit(jobs)
        return [job.future for job in jobs]

    def leading(self) -> AbstractContextManager[None]:
        return self.stepper.leading()

    def follow(self) -> None:
        self.stepper.follow()

    def check(self, name: str, request: Request) -> None:
        super().check(name, request)
        if request.has_images:
            unexpanded_prompt(name, request)
        temperature = request.params.temperature
        if 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"{name}: temperature={temperature}: vLLM samples at {MIN_TEMPERATURE} or above: use 0 (greedy) or at "
                f"least {MIN_TEMPERATURE}"
            )

    def _prepare(self) -> None:
        """Before requests are added, on the thread that steps the engine."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # the current device of this thread
        self._receiver.check_filled()
        self.memory.allocate("weights", "kv_cache")

    def _sampling(self, request: Request, streams: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        more: dict[str, Any] = {"flat_logprobs": True}  # without an object per token
        if not params.greedy:
            more |= {name: getattr(params, name) for name in ("top_k", "top_p", "min_p")}
            more["seed"] = fork_seed(params.seed, request.sample_id)
        return SamplingParams(
            temperature=params.temperature,
            max_tokens=params.max_tokens,
            # vLLM's own end tokens are off: a response ends at those of the request only
            ignore_eos=True,
            stop_token_ids=list(params.active_stop_ids),
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
            **more,
        )


class VllmMemory(EngineMemory):
    """Frees weights and KV cache together, by the sleep mode of a `vllm.LLM`."""

    def __init__(self, llm: Any, sleeps: bool):
        super().__init__(sleeps)
        self._llm = llm

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        self._sleep(level=1)

    def drop(self) -> None:
        """Free the KV cache and discard the weights."""
        self.allocate("weights", "kv_cache")  # of level 1, whose weights are in host memory
        self._sleep(level=2)

    def _sleep(self, level: int) -> None:
        if self._is_on and not self._freed:
            torch.cuda.synchronize()
            self._llm.sleep(level=level)
            self._freed = {"weights", "kv_cache"}

    def _allocate(self, tag: str) -> None:
        try:
            self._llm.wake_up(tags=[tag])
        except RuntimeError as error:  # out of memory
            raise ValueError(
                f"rollout.name=vllm: no memory for vLLM's {tag} ({error}): lower rollout.gpu_memory_utilization, or "
                "offload the trainer (fsdp_config.param_offload, optimizer_offload)"
            ) from error
