"""`rollout.name=vllm`: makes the engine of one rank."""

import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config import schema
from verl.rollout.base import RolloutEnv, SharesWeights
from verl.rollout.engine_copy import EngineCopy
from verl.rollout.external import check_not_deterministic
from verl.rollout.vllm.engine import VllmRollout
from verl.rollout.vllm.settings import engine_args, join_process_group, known_arguments, launcher_variables
from verl.utils.rng import rng_state, set_rng_state


def make_vllm(
    config: schema.RolloutEngineConfig,
    model: schema.ModelConfig,
    env: RolloutEnv,
    train_engine: SharesWeights | None = None,
) -> VllmRollout:
    """Make the engine. It has its own copy of the weights: the trainer pushes them before the first generation; without
    training they are read from the files.

    Raises:
        ImportError, ValueError: vLLM is not installed or too old, settings that contradict each other,
            `rollout.deterministic`, or choices of experts that vLLM does not report.
    """
    check_not_deterministic(config)
    known = known_arguments()
    copy = EngineCopy.from_arguments(config, model, env, train_engine)
    layers = copy.recorded_layers()
    args = engine_args(copy, env, known)
    join_process_group(env)
    engine = VllmRollout(
        _make_llm(args, env, copy.has_experts),
        copy=copy,
        sleeps=bool(args.get("enable_sleep_mode")),
        device=env.device,
        channel=_Group() if env.tp_size > 1 else None,
        recorded_layers=layers,
    )
    copy.fill(engine.receiver())
    return engine


def _make_llm(args: dict[str, Any], env: RolloutEnv, has_experts: bool) -> Any:
    """The `vllm.LLM` of this rank."""
    from vllm import LLM

    on_cpu, generators = env.device.type == "cpu", rng_state()
    with launcher_variables(env), _cpu_kernels(env) if on_cpu else torch.cuda.device(env.device):
        try:
            if has_experts:
                _add_expert_group(env)
            llm = LLM(**args)
        except TypeError as error:  # an argument of engine_kwargs.vllm
            raise ValueError(f"rollout.engine_kwargs.vllm: {error}") from error
        finally:
            set_rng_state(generators)  # vLLM seeds those of the process
    client = llm.llm_engine.engine_core
    if (finalizer := getattr(client, "_finalizer", None)) is not None:
        finalizer.detach()  # it would destroy the process groups of the trainer
        weakref.finalize(llm, client.engine_core.model_executor.shutdown)
    return llm


def _add_expert_group(env: RolloutEnv) -> None:
    """Make vLLM's group of expert-parallel ranks if an earlier engine of this process has made the others without it.

    vLLM makes its groups with the first engine, and this one only for a mixture of experts. Without data parallelism it
    has the ranks of a tensor-parallel group. Collective over all rollout ranks.
    """
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized() or parallel_state._EP is not None:
        return
    world = parallel_state.get_world_group()
    parallel_state._EP = parallel_state.init_model_parallel_group(
        [list(range(first, first + env.tp_size)) for first in range(0, env.world_size, env.tp_size)],
        world.local_rank,
        dist.get_backend(world.device_group),
        group_name="ep",
    )


@contextmanager
def _cpu_kernels(env: RolloutEnv) -> Iterator[None]:
    """Context in which vLLM makes a model for a CPU whose weights can be replaced.

    Its oneDNN kernels compute with packed copies that a push does not reach. Small functions are not compiled, and the
    number of torch's threads can still be set afterwards.
    """
    from vllm import _custom_ops

    set_num_threads = torch.set_num_threads
    _custom_ops._supports_onednn = False
    torch.compiler.set_stance("force_eager")
    try:
        with _own_shared_memory() if env.tp_size > 1 else nullcontext():
            yield
    finally:
        torch.set_num_threads = set_num_threads


@contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Context in which vLLM makes the memory that ranks on a CPU share, under a name that no other engine has.

    vLLM's name is the same for all engines of a host, and stays when a process is killed: the next one would fail. At
    the end of the context every rank has opened the memory, so its name is removed.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names, src=0)
    group_name = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda group: f"{names[0]}{group_name(group).replace('/', '')}")
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(group_name)
        for path in Path("/dev/shm").glob(f"{names[0]}*"):
            path.unlink(missing_ok=True)


class _Group:
    """`stepping.Channel` over vLLM's tensor-parallel group."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_tp_group

        self._group = get_tp_group()

    def send(self, message: Any) -> None:
        self._group.broadcast_object(message, src=0)

    def receive(self) -> Any:
        return self._group.broadcast_object(None, src=0)
