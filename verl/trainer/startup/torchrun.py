"""Commands under torchrun: rank 0 runs the command, the other ranks of its host end at once.

    torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer key=value ...
    torchrun --nnodes=2 --nproc_per_node=4 --master_addr=HOST --node_rank=0 -m verl.trainer.sft_trainer key=value ...

Rank 0 is the controller. It starts one worker process per torchrun rank, as it does without torchrun, so the results
are the same. On several hosts, the first process of each starts a Ray node, and the workers run on this cluster.
torchrun ends when rank 0 does, and fails if it fails.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.config.fields import Schema

#: set by torchrun only; schedulers and earlier jobs of a shell leave the others
_RUN_ID = "TORCHELASTIC_RUN_ID"
_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPTIONAL_VARIABLES = (
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_TWO_CLUSTERS = (
    "torchrun started processes on {} hosts, which become a Ray cluster of this run, but {}: remove it, or start the "
    "command once, without torchrun, to run it on that cluster"
)
#: (hosts, ranks of each) of the command that runs
_size: ContextVar[tuple[int, int] | None] = ContextVar("hosts and ranks of torchrun", default=None)


@dataclass(frozen=True)
class Torchrun:
    """The processes that torchrun started, read from its environment variables."""

    rank: int
    world_size: int
    local_rank: int  # on this host
    local_world_size: int  # number of processes on this host

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Torchrun | None":
        """Read the variables of torchrun; None if a required one is missing."""
        if any(name not in env for name in (_RUN_ID, *_REQUIRED_VARIABLES)):
            return None
        return cls(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
        )

    def run(self, command: Callable[[], int]) -> int:
        """Run `command` on rank 0. Returns its exit status; 0 on other ranks of a host."""
        if self.local_rank:
            return 0
        hosts, rest = divmod(self.world_size, self.local_world_size)
        if rest:
            print(
                f"error: torchrun started {self.world_size} ranks, {self.local_world_size} of them on this host: start "
                "the same number on each host",
                file=sys.stderr,
            )
            return 1
        if hosts > 1 and (cluster := os.environ.get("RAY_ADDRESS")):
            print(f"error: {_TWO_CLUSTERS.format(hosts, f'RAY_ADDRESS is {cluster}')}", file=sys.stderr)
            return 1
        store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        is_held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun
        _remove_variables()  # child processes do not get them
        if hosts == 1:
            return self._lead(command, hosts)
        from verl.single_controller.ray.torchrun_nodes import run_on_nodes

        host = self.rank // self.local_world_size
        return run_on_nodes(lambda: self._lead(command, hosts), host, hosts, store, holds_store=not is_held)

    def _lead(self, command: Callable[[], int], hosts: int) -> int:
        """Run the command with the hosts and ranks of torchrun as settings."""
        token = _size.set((hosts, self.local_world_size))
        try:
            return command()
        finally:
            _size.reset(token)


def run_under_launcher(command: Callable[[], int]) -> int:
    """Run a command: on rank 0 only if torchrun started this process. Returns its exit status."""
    group = Torchrun.from_env(os.environ)
    if group is None and all(name in os.environ for name in _REQUIRED_VARIABLES):
        print(
            f"{', '.join(_REQUIRED_VARIABLES)} are set, but not by torchrun ({_RUN_ID} is not set): they are "
            "ignored, and this process runs the whole command",
            file=sys.stderr,
        )
        _remove_variables()
    return command() if group is None else group.run(command)


def _remove_variables() -> None:
    for name in list(os.environ):
        if name in (*_REQUIRED_VARIABLES, *_OPTIONAL_VARIABLES) or name.startswith("TORCHELASTIC_"):
            del os.environ[name]


def launcher_settings() -> dict[str, Any]:
    """Settings that user settings override: the hosts and ranks that torchrun started."""
    hosts, ranks = _size.get() or (None, None)
    settings = {} if ranks is None else {"trainer.n_gpus_per_node": ranks}
    return settings if hosts in (None, 1) else settings | {"trainer.nnodes": hosts, "trainer.backend": "ray"}


def check_launcher(config: "Schema") -> None:
    """Raise ValueError if torchrun started another number of ranks, or a script instead of a command of the package."""
    trainer = config.trainer
    size, group = _size.get(), Torchrun.from_env(os.environ)
    if size is None and group is not None and group.world_size > 1:
        raise ValueError(
            f"torchrun started this script {group.world_size} times, and each process would train alone: start it once "
            f"with `python` and trainer.n_gpus_per_node={group.world_size}; the trainer starts the ranks. (Under "
            "torchrun, run a command of the package, such as `torchrun -m verl.trainer.sft_trainer`)"
        )
    if size is not None and size[0] > 1 and (cluster := config.ray_kwargs.ray_init.get("address")):
        raise ValueError(_TWO_CLUSTERS.format(size[0], f"ray_kwargs.ray_init.address is {cluster}"))
    if size is not None and size != (trainer.nnodes, trainer.n_gpus_per_node):
        raise ValueError(
            f"torchrun started {size[1]} ranks on each of {size[0]} hosts, but trainer.n_gpus_per_node is "
            f"{trainer.n_gpus_per_node} and trainer.nnodes is {trainer.nnodes}: remove these keys, or set "
            "--nproc_per_node and --nnodes to them"
        )
