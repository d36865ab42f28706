"""Breaks rank 1 of a run in one phase: given as `imports`, switched by VERL_TEST_FAULT="phase:kind"."""

import os
import signal
import time

from verl.engines.torch_engine import TorchEngine
from verl.rollout.native.engine import NativeRollout


def strike(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise RuntimeError("planted fault")
    time.sleep(1000)


def break_phase(cls: type, method: str, kind: str) -> None:
    original = vars(cls)[method]

    def broken(self, *args, **kwargs):
        strike(kind)
        return original(self, *args, **kwargs)

    setattr(cls, method, broken)


PHASES = {"generate": (NativeRollout, "generate"), "infer": (TorchEngine, "infer")}
PHASES |= {"update": (TorchEngine, "train_batch"), "save": (TorchEngine, "save")}
fault = os.environ.get("VERL_TEST_FAULT")
if fault and os.environ.get("RANK") == "1":
    phase, kind = fault.split(":")
    break_phase(*PHASES[phase], kind)
