"""The job of the benchmarks of reliability: a policy with about 100,000 random weights, a small task, and its settings.

Nothing is downloaded. `make_job` writes model, data, reward and tools into a folder; `settings` are the overrides of a
run with them; `fork_run` runs them in a fork of this process, which has imported everything.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil

ROOT = Path(__file__).resolve().parents[1]

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The share of the characters of a response that are letters, and a bonus for those of the answer."""
    letters = sum(c.isalpha() for c in solution_str) + sum(a == b for a, b in zip(solution_str, ground_truth))
    return letters / max(len(solution_str), 1)
'''
TOOLS = '''
import json

from verl.agents.tools.function_tool import function_tool
from verl.agents.tools.parsers import FunctionCall, ToolParser, register_tool_parser


@function_tool
def count(text: str) -> str:
    """Count characters.

    Args:
        text: any text.
    """
    return f"{len(text)}"


@register_tool_parser("every_turn")
class EveryTurn(ToolParser):
    """Every turn that ends with a stop string is a call: a random policy writes no other."""

    def parse(self, text):
        return "", [FunctionCall("count", json.dumps({"text": text}))]
'''
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl
#: turns of a policy that has not learned to call tools
AGENT = [
    "actor_rollout_ref.rollout.stop=[z,x,Q]",
    "actor_rollout_ref.rollout.multi_turn.enable=true",
    "actor_rollout_ref.rollout.multi_turn.format=every_turn",
    "actor_rollout_ref.rollout.multi_turn.tool_isolation=none",
    "data.max_prompt_length=64",
    "data.max_response_length=48",
]


def make_job(folder: Path) -> Path:
    """Write model/, chat_model/, train.jsonl (48 rows), chat.jsonl (48 rows), reward.py and tools.py."""
    sys.path[:0] = [str(ROOT)] * (str(ROOT) not in sys.path)
    from examples.quickstart.tiny_model import tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    tiny_model("llama", folder / "model", seed=0)
    tiny_model("qwen2", folder / "chat_model", size="tiny")
    draw = Random(0)
    texts = ["".join(draw.choice("abcdefghij") for _ in range(4)) for _ in range(48)]
    write_rows(folder / "train.jsonl", [{"prompt": f"{text}=", "answer": text} for text in texts])
    chats = [[{"role": "user", "content": f"Go {i}."}] for i in range(48)]
    write_rows(folder / "chat.jsonl", [{"prompt": chat, "answer": "1", "data_source": "x"} for chat in chats])
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "tools.py").write_text(TOOLS, encoding="utf-8")
    return folder


def write_rows(file: Path, rows: Sequence[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def settings(job: Path, run: Path, *more: str, agent: bool = False) -> list[str]:
    """Overrides of a run of 8 prompts x 2 samples with 2 updates a step. agent: with tools, over several turns."""
    model, data = ("chat_model", "chat") if agent else ("model", "train")
    file = job / "tools.py"
    tools = [f"actor_rollout_ref.rollout.multi_turn.function_tool_path={file}", f"imports=[{file}]"]
    return [
        f"data.train_files={job / data}.jsonl",
        f"data.val_files={job / data}.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={job / model}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"reward.custom_reward_function.path={job / 'reward.py'}",
        "reward.isolation=none",
        f"trainer.default_local_dir={run}",
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",
        "trainer.val_before_train=false",
        *([*AGENT, *tools] if agent else []),
        *more,
    ]


def warm_up(job: Path) -> None:
    """Run one step of both models in this process, so that its forks have imported and compiled all that they need."""
    from verl.trainer.main_ppo import main

    for agent in (False, True):
        run = job / f"warm_up_{agent}"
        name = ["algorithm.name=grpo" if agent else "algorithm.name=ppo", "trainer.total_training_steps=1"]
        if status := main(settings(job, run, *name, agent=agent)):
            raise RuntimeError(f"the run in {run} ended with exit status {status}")
    gc.collect()
    gc.freeze()


def fork_run(arguments: Sequence[str], log: Path, trainer: type | None = None) -> int:
    """Start `verl train` with these arguments in a fork, the leader of a new session. Returns its process id.

    Args:
        trainer: a subclass of PPOTrainer.
    """
    deadline = time.monotonic() + 30
    while threading.active_count() > 1:  # those of pools that are collected end a little later
        if time.monotonic() > deadline:
            raise RuntimeError(f"expected one thread before a fork, found {threading.enumerate()}")
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with log.open("a", encoding="utf-8") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        from verl.trainer.main_ppo import main

        status = main(list(arguments), trainer)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def adopt_processes() -> None:
    """Become the parent of processes that runs leave, and end all children with this process."""
    signal.signal(signal.SIGTERM, _end_children)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)


def _end_children(number: int, frame: object) -> None:
    """When this process is ended."""
    for process in psutil.Process().children(recursive=True):
        process.kill()
    sys.exit(128 + number)


def ended(pid: int) -> int | None:
    """The exit status of a child, negative for a signal; None if it runs."""
    child, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if child else None


def left_processes(seconds: float = 120.0) -> list[str]:
    """Processes that a dead run has left, which this process adopts: those that do not end within some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = psutil.Process().children(recursive=True)
        if not left:
            return []
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    names = []
    for process in left:
        with suppress(psutil.Error):
            names.append(f"process {process.pid} is left: {' '.join(process.cmdline())[:200]}")
            process.kill()
    return names
