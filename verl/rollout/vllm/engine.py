"""The vLLM rollout engine: vLLM's engine in this process, with the contract of `verl.rollout.base.RolloutEngine`."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import torch

from verl.rollout.adapters import AdaptedLayers
from verl.rollout.base import RolloutStats
from verl.rollout.checks import check_request, unexpanded_prompt
from verl.rollout.engine_copy import CopyRollout
from verl.rollout.request import Completion, Request, matches_ids
from verl.rollout.vllm.adapters import VllmAdapterReceiver, lora_request
from verl.rollout.vllm.capabilities import Capabilities
from verl.rollout.vllm.slices import VllmSliceReceiver
from verl.rollout.vllm.stepping import Channel, Job, Stepper
from verl.rollout.vllm.weights import VllmReceiver
from verl.utils.rng import fork_seed

log = logging.getLogger(__name__)

#: vLLM raises lower temperatures to this one
MIN_TEMPERATURE = 0.01
_LENGTH = "rollout.max_model_len, by default data.max_prompt_length + data.max_response_length"


class VllmRollout(CopyRollout):
    """Generates with vLLM (Kwon et al. 2023, arXiv 2309.06180). All ranks of a group take the same steps.

    Log-probs are those of the distribution that was sampled from (vLLM's `processed_logprobs`): after temperature,
    min-p, top-k and top-p, in float32; of the unscaled distribution when greedy. vLLM applies min-p before top-k and
    top-p, and `native` after them.

    Random numbers of a response depend only on its seed and sample id, but they are vLLM's: other engines sample other
    tokens.

    Args:
        llm: a `vllm.LLM`.
        capabilities: of the installed vLLM.
        vocab_size: number of tokens of the model.
        max_length: longest sequence, prompt plus response.
        shapes: HuggingFace name of every parameter -> its shape.
        has_weights: whether the weights were loaded from files.
        sleeps: whether vLLM's sleep mode is on.
        device: device of the engine.
        channel: to the other ranks of the tensor-parallel group; None without them.
        reads_images: whether the model is a vision-language model.
        recorded_layers: the layers with experts, if completions have `routed_experts`.
        adapted_layers: the layers whose LoRA adapters vLLM applies; None: weights are merged.
    """

    def __init__(
        self,
        llm: Any,
        capabilities: Capabilities,
        *,
        vocab_size: int,
        max_length: int,
        shapes: Callable[[], dict[str, torch.Size]],
        has_weights: bool,
        sleeps: bool,
        device: torch.device,
        channel: Channel | None = None,
        reads_images: bool = False,
        recorded_layers: list[int] | None = None,
        adapted_layers: AdaptedLayers | None = None,
    ):
        self.llm = llm
        self.capabilities = capabilities
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.device = device
        self.reads_images = reads_images
        self.records_routing = recorded_layers is not None
        self.stats = RolloutStats()
        self.memory = EngineMemory(llm, sleeps)
        self.stepper = Stepper(
            llm.llm_engine,
            self._sampling,
            self._prepare,
            lambda: self.weight_version,
            channel,
            recorded_layers,
            None if adapted_layers is None else lora_request(),
        )
        self._receiver = (
            VllmSliceReceiver(self, shapes, filled=has_weights)
            if adapted_layers is None
            else VllmAdapterReceiver(self, shapes, adapted_layers)
        )

    # ---- generating ---------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self.stepper.steps

    def submit(self, requests: Sequence[Request], is_batch: bool) -> "list[Future[Completion]]":
        """See `CopyRollout.submit`."""
        jobs = [Job(request, not is_batch or request.params.stop is not None) for request in requests]
        self.stepper.submit(jobs)
        return [job.future for job in jobs]

    def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`. Requests of a running `generate` end without tokens unless they have stop
        strings."""
        self.stepper.abort(lambda request: matches_ids(request, request_ids))

    def leading(self) -> AbstractContextManager[None]:
        """See `RolloutEngine.leading`."""
        return self.stepper.leading()

    def follow(self) -> None:
        """See `RolloutEngine.follow`."""
        self.stepper.follow()

    def check(self, name: str, request: Request) -> None:
        """See `CopyRollout.check`."""
        check_request(name, request, "vllm", self.vocab_size, self.max_length, _LENGTH, self.reads_images)
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
        self.memory.wake()

    def _sampling(self, request: Request, streams: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = request.params
        more = {"flat_logprobs": True} if self.capabilities.flat_logprobs else {}
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

    # ---- memory and weights -------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Free the KV cache; the weights are moved to host memory. Does nothing on a CPU.

        Raises:
            ValueError: requests are running.
        """
        with self.stepper.between_steps("sleep()", idle=True):
            self.memory.sleep()

    def receiver(self) -> VllmReceiver:
        return self._receiver


class EngineMemory:
    """The GPU memory of the engine: weights and KV cache, which can be freed and allocated again.

    Args:
        llm: a `vllm.LLM`.
        sleeps: whether its sleep mode is on; otherwise nothing is freed.
    """

    def __init__(self, llm: Any, sleeps: bool):
        self._llm = llm
        self._sleeps = sleeps
        self._said = False
        self._asleep: set[str] = set()  # of "weights" and "kv_cache"

    def sleep(self) -> None:
        """Free the KV cache and move the weights to host memory."""
        self._sleep(level=1)

    def drop(self) -> None:
        """Free the KV cache and discard the weights."""
        if self._asleep:  # level 1, whose weights are in host memory
            self._wake({"weights", "kv_cache"})
        self._sleep(level=2)

    def wake_weights(self) -> None:
        """Allocate the weights; those that were moved to host memory are restored."""
        self._wake({"weights"})

    def wake(self) -> None:
        """Allocate the weights and the KV cache."""
        self._wake({"weights", "kv_cache"})

    def _sleep(self, level: int) -> None:
        if not self._sleeps:
            if not self._said:
                log.info("rollout.name=vllm: sleep mode is off (a CPU, or free_cache_engine=false): nothing is freed")
                self._said = True
            return
        if self._asleep:
            return
        torch.cuda.synchronize()
        self._llm.sleep(level=level)
        self._asleep = {"weights", "kv_cache"}

    def _wake(self, tags: set[str]) -> None:
        for tag in sorted(tags & self._asleep, reverse=True):  # the weights first
            try:
                torch.cuda.empty_cache()
                self._llm.wake_up(tags=[tag])
            except RuntimeError as error:  # out of memory
                raise ValueError(
                    f"rollout.name=vllm: no memory for vLLM's {tag} ({error}): lower "
                    "rollout.gpu_memory_utilization, or offload the trainer (fsdp_config.param_offload, "
                    "optimizer_offload)"
                ) from error
            self._asleep.discard(tag)
