"""Commands under torchrun: rank 0 runs the command, the other ranks wait for its exit status.

    torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer key=value ...

Rank 0 is the controller. It starts one worker process per torchrun rank, as it does without torchrun, so the results
are the same. The waiting ranks load no model and use no GPU. If a rank is killed, torchrun ends the others.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from verl.utils.rendezvous import tcp_store

if TYPE_CHECKING:
    from torch.distributed import Store

    from verl.config.fields import Schema

_REQUIRED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OPTIONAL_VARIABLES = (
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE"),
)
_POLL_SECONDS = 0.3
_READ_SECONDS = 10.0  # for the other ranks to read the exit status, if rank 0 hosts the store

_ranks: ContextVar[int | None] = ContextVar("ranks of torchrun", default=None)


@dataclass(frozen=True)
class Torchrun:
    """The processes that torchrun started, read from its environment variables."""

    rank: int
    world_size: int
    local_world_size: int  # number of processes on this host
    address: str  # of the rendezvous store
    port: int
    agent_store: bool = False  # torchrun hosts the store; otherwise rank 0 does
    restarts: int = 0  # how often torchrun has restarted the group

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Torchrun | None":
        """Read the variables of torchrun; None if a required one is missing."""
        if any(name not in env for name in _REQUIRED_VARIABLES):
            return None
        return cls(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            address=env["MASTER_ADDR"],
            port=int(env["MASTER_PORT"]),
            agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )

    def run(self, command: Callable[[], int]) -> int:
        """Run `command` on rank 0. Returns its exit status on every rank."""
        if self.local_world_size < self.world_size:
            if self.rank == 0:
                print(
                    f"error: torchrun started {self.world_size} ranks on several nodes ({self.local_world_size} on "
                    "this one). Several nodes are supported on Ray: start the command once, without torchrun, with "
                    "trainer.backend=ray (docs/multinode.md)",
                    file=sys.stderr,
                )
            return 1
        if self.world_size == 1:
            return self._lead(command)
        return self._lead_and_report(command) if self.rank == 0 else self._wait()

    def _lead(self, command: Callable[[], int]) -> int:
        """Run the command with the number of torchrun ranks. Child processes do not get the variables of torchrun."""
        for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        for name in (*_REQUIRED_VARIABLES, *_OPTIONAL_VARIABLES):
            os.environ.pop(name, None)
        token = _ranks.set(self.world_size)
        try:
            return command()
        finally:
            _ranks.reset(token)

    def _lead_and_report(self, command: Callable[[], int]) -> int:
        store, status = self._store(), 1
        try:
            status = self._lead(command)
        except KeyboardInterrupt:
            status = 130
            raise
        finally:
            self._report(store, status)
        return status

    def _report(self, store: "Store", status: int) -> None:
        try:
            store.set(self._key("status"), str(status))
            deadline = time.monotonic() + (0 if self.agent_store else _READ_SECONDS)
            while time.monotonic() < deadline and store.add(self._key("read"), 0) < self.world_size - 1:
                time.sleep(_POLL_SECONDS / 10)
        except RuntimeError as error:  # torchrun has ended: no rank is waiting
            print(f"the exit status {status} did not reach the other ranks: {error}", file=sys.stderr)

    def _wait(self) -> int:
        try:
            store = self._store()
            while not store.check([self._key("status")]):
                time.sleep(_POLL_SECONDS)
            status = int(store.get(self._key("status")))
            store.add(self._key("read"), 1)
            return status
        except KeyboardInterrupt:
            return 130
        except RuntimeError as error:
            print(f"error: rank {self.rank} lost rank 0: {str(error).splitlines()[0]}", file=sys.stderr)
            return 1

    def _store(self) -> "Store":
        hosts = self.rank == 0 and not self.agent_store
        return tcp_store(self.address, self.port, None, hosts, timedelta(minutes=5), wait_for_workers=False)

    def _key(self, name: str) -> str:
        return f"verl/{self.restarts}/{name}"


def run_under_launcher(command: Callable[[], int]) -> int:
    """Run a command: on rank 0 only if torchrun started this process. Returns its exit status."""
    group = Torchrun.from_env(os.environ)
    return command() if group is None else group.run(command)


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
