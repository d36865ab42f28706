"""Commands under torchrun: rank 0 runs the command, the other ranks end at once.

    torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer key=value ...

Rank 0 is the controller. It starts one worker process per torchrun rank, as it does without torchrun, so the results
are the same. torchrun ends when rank 0 does, and fails if it fails.
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
_ranks: ContextVar[int | None] = ContextVar("ranks of torchrun", default=None)


@dataclass(frozen=True)
class Torchrun:
    """The processes that torchrun started, read from its environment variables."""

    rank: int
    world_size: int
    local_world_size: int  # number of processes on this host

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Torchrun | None":
        """Read the variables of torchrun; None if a required one is missing."""
        if any(name not in env for name in (_RUN_ID, *_REQUIRED_VARIABLES)):
            return None
        return cls(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
        )

    def run(self, command: Callable[[], int]) -> int:
        """Run `command` on rank 0. Returns its exit status; 0 on other ranks."""
        if self.local_world_size < self.world_size:
            if self.rank == 0:
                print(
                    f"error: torchrun started {self.world_size} ranks on several nodes ({self.local_world_size} on "
                    "this one). Several nodes are supported on Ray: start the command once, without torchrun, with "
                    "trainer.backend=ray (docs/multinode.md)",
                    file=sys.stderr,
                )
            return 1
        return self._lead(command) if self.rank == 0 else 0

    def _lead(self, command: Callable[[], int]) -> int:
        """Run the command with the number of torchrun ranks. Child processes do not get the variables of torchrun."""
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        _remove_variables()
        token = _ranks.set(self.world_size)
        try:
            return command()
        finally:
            _ranks.reset(token)


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
    for name in (*_REQUIRED_VARIABLES, *_OPTIONAL_VARIABLES):
        os.environ.pop(name, None)


def launcher_settings() -> dict[str, Any]:
    """Settings that user settings override: the number of ranks that torchrun started."""
    ranks = _ranks.get()
    return {} if ranks is None else {"trainer.n_gpus_per_node": ranks}


def check_launcher(config: "Schema") -> None:
    """Raise ValueError if torchrun started another number of ranks, or a script instead of a command of the package."""
    trainer = config.trainer
    ranks, group = _ranks.get(), Torchrun.from_env(os.environ)
    if ranks is None and group is not None and group.world_size > 1:
        raise ValueError(
            f"torchrun started this script {group.world_size} times, and each process would train alone: start it once "
            f"with `python` and trainer.n_gpus_per_node={group.world_size}; the trainer starts the ranks. (Under "
            "torchrun, run a command of the package, such as `torchrun -m verl.trainer.sft_trainer`)"
        )
    if ranks is not None and ranks != trainer.n_gpus_per_node * trainer.nnodes:
        raise ValueError(
            f"torchrun started {ranks} ranks (WORLD_SIZE={ranks}), but trainer.n_gpus_per_node is "
            f"{trainer.n_gpus_per_node} and trainer.nnodes is {trainer.nnodes}: remove these keys, or set "
            "--nproc_per_node to the product of the two"
        )
