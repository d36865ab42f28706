"""Processes that call functions of the user: what the pools of reward functions and of tools have in common.

    helper = HelperProcess("verl.rewards.sandbox.worker", OMP_NUM_THREADS="1")
    helper.send(message)
    reply = helper.receive(timeout=1.0)        # None: no reply yet; EOFError: the process has ended
    helper.end()                               # with everything that it started

    parent = Parent()                          # in the process
    parent.send("ready")
    message = parent.receive()

The pools differ in what they send, in their deadlines and in which errors end a process; that is in their own modules.
"""

import contextlib
import os
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

from verl.processes.channel import Channel
from verl.processes.child import PythonProcess, helper_environment

START_SECONDS = 300.0  # for a process to start and import the files of the user: a shared disk can be slow at first
EXIT_SECONDS = 5.0  # between the end of the channel and that of the process
PARENT_SECONDS = 1.0  # between two checks of the parent


class HelperProcess(PythonProcess):
    """A process that calls functions of the user, with a channel to it.

    Args:
        module: Module to run; it makes a `Parent`.
        **defaults: Values of environment variables that are not set.
    """

    def __init__(self, module: str, **defaults: str):
        self.channel, theirs = Channel.pair()
        with theirs:
            super().__init__(module, [theirs.fileno()], helper_environment(**defaults))

    def send(self, message: bytes) -> None:
        """Send a pickled message. If the process has ended, `receive` reports that."""
        with contextlib.suppress(OSError):  # the channel may also be closed already, by another thread
            self.channel.send(message)

    def receive(self, timeout: float) -> Any:
        """The next message; None if there is none within `timeout` seconds.

        Raises:
            EOFError: The process has ended, and all its messages are read.
            Exception: The message cannot be unpickled, which runs code of the user.
        """
        if self.channel.has_message(timeout):
            return pickle.loads(self.channel.receive()[0])
        if self.has_ended():
            raise EOFError(f"process {self.pid} has ended")
        return None

    def has_ended(self) -> bool:
        """Whether the process has ended, and all its messages are read. A fork of it may keep the channel open."""
        return self.poll() is not None and not self.channel.has_message()

    def end(self, seconds: float = 0.0) -> int:
        """See `ChildProcess.end`. Closes the channel."""
        status = super().end(seconds)
        self.channel.close()
        return status


class Parent:
    """In a helper process: the channel to its parent. The process ends with its parent, also while a function hangs."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # if the machine runs out of memory, this process ends, not the trainer
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
        self._channel, self._pid = Channel(int(sys.argv[1])), os.getpid()
        threading.Thread(target=_exit_with, args=(os.getppid(),), daemon=True).start()

    def send(self, *message: Any) -> None:
        """Send a message.

        A function that forks returns twice. The fork has the same channel, and its reply would be taken for that of
        this process, so it ends.
        """
        if os.getpid() != self._pid:
            os._exit(0)
        data = pickle.dumps(message)
        try:
            self._channel.send(data)
        except ConnectionError:
            os._exit(0)

    def receive(self) -> Any:
        """The next message. The process ends if the parent has closed the channel."""
        try:
            data, _ = self._channel.receive()
        except EOFError:
            os._exit(0)
        return pickle.loads(data)


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os._exit(1)
