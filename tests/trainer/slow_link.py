"""A slow and lossy Ethernet link between two network namespaces, relayed by a thread of this process.

The kernels of many machines have no `tc netem`. Each host gets a TAP device, whose frames arrive at the other one after
a delay, or not at all.
"""

import contextlib
import fcntl
import os
import random
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000


def open_tap(name: str) -> int:
    """A TAP device of this namespace, and the descriptor of its frames; the device may move to another namespace."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


@contextlib.contextmanager
def relay(first: int, second: int, seconds: float, loss: float) -> Iterator[None]:
    """Exchange the frames of two TAP devices: each is lost with probability `loss`, or arrives after `seconds`."""
    ended, draw = threading.Event(), random.Random(0)
    other = {first: second, second: first}
    waiting: deque[tuple[float, int, bytes]] = deque()

    def run() -> None:
        while not ended.is_set():
            pause = max(waiting[0][0] - time.monotonic(), 0) if waiting else 0.2
            for source in select.select([first, second], [], [], min(pause, 0.2))[0]:
                with contextlib.suppress(BlockingIOError):
                    while frame := os.read(source, 65536):
                        if draw.random() >= loss:
                            waiting.append((time.monotonic() + seconds, other[source], frame))
            while waiting and waiting[0][0] <= time.monotonic():
                _, target, frame = waiting.popleft()
                with contextlib.suppress(OSError):  # its queue is full, or its device is down: one more loss
                    os.write(target, frame)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        os.close(first)
        os.close(second)
