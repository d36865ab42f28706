"""Loads the trainer's weights into SGLang's processes, and manages the memory of the engine."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from verl.rollout.engine_copy import EngineCopy, EngineMemory, EngineReceiver
from verl.rollout.sglang.loader import INSTRUCTION, check_outcomes, instruction, sums_of_bits
from verl.rollout.sglang.service import Service
from verl.weight_sync.base import check_parameters
from verl.weight_sync.buckets import BUCKET_BYTES, pack


class SglangMemory(EngineMemory):
    """Frees weights and KV cache by SGLang's memory saver. Weights are lost.

    Args:
        service: the engine.
        saves: whether the memory saver is on.
    """

    def __init__(self, service: Service, saves: bool):
        super().__init__(saves)
        self._service = service

    def sleep(self) -> None:
        """Free the KV cache."""
        self._free("kv_cache")

    def drop(self) -> None:
        """Free the KV cache and the weights."""
        self._free("kv_cache", "weights")

    def _free(self, *tags: str) -> None:
        if not self._is_on:
            return
        with self._lock:
            if todo := [tag for tag in tags if tag not in self._freed]:
                self._service.engine.release_memory_occupation(tags=todo)
                self._freed.update(todo)

    def _allocate(self, tag: str) -> None:
        self._service.engine.resume_memory_occupation(tags=[tag])


class SglangReceiver(EngineReceiver):
    """Receives weights by HuggingFace name and loads them in SGLang's processes.

    SGLang's loaders skip names that they do not know. So a push is verified: names and shapes are those of the
    HuggingFace model, and every tensor-parallel rank has received the bits that were sent (`loader.check_received`).
    Every response reports the version of its weights (`Service`), and the canary of the trainer compares the rest.

    Args:
        service: the engine.
        memory: its memory.
        copy: the model.
        device: of the buckets.
        ranks: tensor-parallel size.
    """

    def __init__(self, service: Service, memory: SglangMemory, copy: EngineCopy, *, device: torch.device, ranks: int):
        super().__init__(service, memory, copy.shapes, copy.reads_files)
        self._service = service
        self._dtype = copy.dtype
        self._device = device
        self._ranks = ranks
        self._sessions = service.capabilities.update_sessions

    @torch.no_grad()
    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `WeightReceiver.receive`. Parameters are cast to the engine's dtype.

        Requests of `generate_one` may be running: they continue with the new weights if SGLang can interrupt them;
        otherwise the push begins when they are finished.

        Raises:
            ValueError: unknown, repeated or missing parameters, another shape, or weights that SGLang did not load.
        """
        with tempfile.TemporaryDirectory(prefix="verl-sglang-") as folder, self._updating(version):
            named = check_parameters(weights, self.shapes, version)
            # `_send` returns when the scheduler has loaded the bucket
            for bucket in pack(named, device=self._device, dtype=self._dtype, bucket_bytes=BUCKET_BYTES):
                self._send([*bucket.parameters()], Path(folder))
            if self._device.type == "cuda":
                torch.cuda.ipc_collect()
            self._send([], Path(folder), version)

    @contextmanager
    def _session(self, version: int | None = None, running: None = None) -> Iterator[None]:
        """See `EngineReceiver._session`. SGLang's own, in which it updates weights. version: None keeps it."""
        if self._sessions:
            _check(self._service.engine.begin_weight_update())
        try:
            yield
        finally:
            if self._sessions:
                _check(self._service.engine.end_weight_update())
        if version is not None:
            self._service.version = str(version)

    def prepare_release(self) -> None:
        """Let SGLang's processes wait for their GPU before memory is freed, see `loader.wait_before_unmapping`."""
        with (
            tempfile.TemporaryDirectory(prefix="verl-sglang-") as folder,
            self._service.exclusive("the first call"),
            self._session(),
        ):
            self._send([], Path(folder))

    def _send(self, tensors: list[tuple[str, torch.Tensor]], folder: Path, version: int | None = None) -> None:
        """Load weights in every rank. version: of the push, on its last call."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        outcome, is_last = folder / "outcome", version is not None
        order = instruction(outcome, sums_of_bits(tensors)).to(self._device)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the other processes do not know this stream
        content = [*tensors, (INSTRUCTION, order)]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize(content) for _ in range(self._ranks)],
            load_format="verl.rollout.sglang.loader.load",
            flush_cache=is_last,
            weight_version=str(version) if is_last else None,
        )
        engine = self._service.engine
        _check(engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request, None)))
        check_outcomes(outcome, self._ranks)


def _check(result: tuple[bool, str]) -> None:
    """Raise ValueError if SGLang reports a failure."""
    success, message = result[:2]
    if not success:
        raise ValueError(f"rollout.name=sglang: the weights were not updated: {message}")


class FollowerReceiver:
    """The receiver of the other ranks of a tensor-parallel group: rank 0 loads the weights of the group."""

    def receive(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take part in gathering the weights."""
        for _ in weights:
            pass

    def release(self) -> None:
        """Does nothing: rank 0 frees the memory of the group."""
