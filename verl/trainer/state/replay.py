"""Replay of a bad step on a CPU: which sample, which column and which operator produced a value that is not finite.

    verl replay checkpoints/gsm8k/run/bad_steps/step_12

First the columns of the dumped batch are searched. Then the update of the role is computed again for every sample by
itself, with a learning rate of 0. Of a sample whose gradient or loss is not finite, the first operator of torch whose
inputs are finite and whose output is not is named, with the line of the forward pass that it belongs to.
"""

import traceback
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.columns import BadValues, find_bad_values
from verl.config import load_config
from verl.config.schema import Config
from verl.protocol import DataProto
from verl.registry import import_module
from verl.single_controller.worker import Worker
from verl.trainer.ppo.operators import sequence_columns, update_rows
from verl.trainer.state.saved_state import load_state
from verl.utils.paths import expanded, resolved
from verl.workers.critic import CriticWorker
from verl.workers.policy import ActorWorker

_UNKNOWN_OPERATOR = "not found"
#: role -> (method of its worker, section of its settings)
_UPDATES = {"actor": ("update_actor", "actor_rollout_ref.actor"), "critic": ("update_critic", "critic")}


@dataclass(frozen=True)
class BadSample:
    """A sample whose update is not finite. operator: of torch; line: of the forward pass."""

    row: int
    uid: str
    operator: str
    line: str


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
        step: the step of the run.
        bad: metric -> value, of the skipped updates and broken tensors.
        columns: bad values, with the operator of the flow that wrote each column.
        samples: of each role; a role that cannot be replayed is missing.
        notes: how the replay differs from the run.
    """

    step: int
    bad: dict[str, float]
    columns: list[tuple[BadValues, str]]
    samples: dict[str, list[BadSample]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def has_cause(self) -> bool:
        """Whether a cause was found."""
        return bool(self.columns) or any(self.samples.values())

    def lines(self) -> Iterator[str]:
        """The report."""
        yield f"step {self.step}: {', '.join(f'{name} {value:.3g}' for name, value in self.bad.items())}"
        for values, writer in self.columns:
            yield f"column {values.column!r}, written by the operator {writer!r}: {values}"
        for role, samples in self.samples.items():
            for sample in samples:
                suffix = f", {sample.line}" if sample.line else ""
                yield f"{role}: sample {sample.row} (uid {sample.uid}): {sample.operator}{suffix}"
            if not samples:
                which = "sample without a bad column" if self.columns else "sample"
                yield f"{role}: the update of every {which} is finite"
        yield from (f"note: {note}" for note in self.notes)


def replay(dump: Path) -> Replay:
    """Replay the bad step in a folder `bad_steps/step_N`.

    Raises:
        ValueError: the folder is not a dump.
    """
    state = load_state(dump, "step")
    if not isinstance(state, dict) or state.get("format") != 1:
        raise ValueError(f"{dump}: expected a dump of a bad step in format 1")
    batch: DataProto = state["batch"]
    columns = [(values, state["writers"].get(values.column, "prompts")) for values in find_bad_values(batch.tensors)]
    result = Replay(state["step"], state["bad"], columns)
    for role in state["roles"]:
        weights = state["weights"][role]
        model = None if weights["path"] is None else _model(dump, weights["path"])
        is_rl = role in _UPDATES and any(name.startswith(f"{role}/") for name in state["bad"])  # SFT: train/...
        if not is_rl or model is None:
            reason = f" ({dump / weights['path']} has no weights of a whole model)" if is_rl and weights["path"] else ""
            result.notes.append(f"the update of the {role} is not replayed{reason}: only its columns were searched")
            continue
        if not weights["unchanged"]:
            result.notes.append(f"the weights of the {role} are not exactly those of the bad update")
        worker = _worker(role, dump, model, state)
        if role == "actor" and "old_log_probs" in batch:
            result.notes.append(_compare(worker, batch))
        result.samples[role] = list(_bad_samples(worker, role, batch))
    return result


def _model(dump: Path, weights: str) -> Path | None:
    """The model of a role: in the dump, or in a checkpoint, also if the folder of the run has moved. None: gone.

    A checkpoint of a LoRA run has the weights of the adapters only.
    """
    for folder in (dump / weights, resolved(dump).parents[1].joinpath(*Path(weights).parts[-2:])):
        if any((folder / "huggingface").glob("*.safetensors")):
            return resolved(folder / "huggingface")
    return None


def _worker(role: str, dump: Path, model: Path, state: dict[str, Any]) -> Worker:
    """The worker of a role on a CPU, with the weights of the dump and a learning rate of 0."""
    section, total_steps = _UPDATES[role][1], state["total_steps"]
    path = "actor_rollout_ref.model" if role == "actor" else "critic.model"
    settings = {"trainer.device": "cpu", f"{section}.strategy": "fsdp2", f"{path}.path": str(model)}
    settings |= {f"{section}.optim.lr": 0.0, f"{path}.lora_rank": 0}
    config = load_config(dump / "config.yaml", settings, schema=Config)
    for address in config.imports:  # relative paths start where the run was started
        is_file = address.endswith(".py")
        import_module(str(Path(state["working_dir"]) / expanded(address)) if is_file else address)
    if role == "critic":
        return CriticWorker(config.critic, device="cpu", total_training_steps=total_steps)
    return ActorWorker(
        config.actor_rollout_ref,
        correction=config.algorithm.rollout_correction,
        device="cpu",
        total_training_steps=total_steps,
        pad_token_id=0,
        stop_token_ids=(),
        hosts_rollout=False,
    )


def _compare(worker: Any, batch: DataProto) -> str:
    """How far log-probs of this replay are from those of the run."""
    inputs = sequence_columns(batch)
    inputs.meta_info["outputs"] = ()
    mask = batch.batch["response_mask"].bool()
    log_probs = worker.compute_log_prob(inputs).batch["old_log_probs"]
    difference = (log_probs - batch.batch["old_log_probs"]).abs()[mask].max().item()
    return f"log-probs of the replay and of the run differ by at most {difference:.3g}"


def _bad_samples(worker: Any, role: str, batch: DataProto) -> Iterator[BadSample]:
    """The samples whose update is not finite, with the operator that is the cause."""
    rows = update_rows(batch)
    update = getattr(worker, _UPDATES[role][0])
    bad, benign = [], None
    for row in range(len(rows)):
        sample = rows[[row]]
        if find_bad_values(sample.tensors):  # named among the columns
            continue
        sample.meta_info |= {"mini_batch_rows": 1, "last_pass": False}
        if update(sample)[f"{role}/grad_skipped"][0]:
            bad.append((row, sample))
        elif benign is None:
            with FirstBadOperator() as trace:
                update(sample)
            benign = trace.names
    for row, sample in bad:
        with FirstBadOperator(benign or ()) as trace, torch.autograd.set_detect_anomaly(True, check_nan=False):
            update(sample)
        uid = str(batch.non_tensor_batch["uid"][row]) if "uid" in batch.non_tensor_batch else "?"
        yield BadSample(row, uid, trace.operator, trace.line)


class FirstBadOperator(TorchDispatchMode):
    """Finds the first operator of torch with finite inputs and an output that is not finite.

    Args:
        benign: operators that do so in a correct computation, such as an attention mask of -inf.

    Attributes:
        names: all operators that do so.
        operator: the first one that is not benign; in a backward pass, with its autograd node.
        line: the line of the forward pass that it belongs to.
    """

    def __init__(self, benign: Collection[str] = ()):
        super().__init__()
        self._benign = benign
        self.names: set[str] = set()
        self.operator = _UNKNOWN_OPERATOR
        self.line = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        has_bad_inputs = self._is_bad((args, kwargs))  # before the call, which may write to them
        output, name = func(*args, **(kwargs or {})), str(func)
        # empty, empty_like, new_empty, ...: memory that is not written yet may have any values
        if has_bad_inputs or "empty" in name or not self._is_bad(output):
            return output
        self.names.add(name)
        if self.operator == _UNKNOWN_OPERATOR and name not in self._benign:
            node = torch._C._current_autograd_node()  # None in a forward pass
            self.operator = name if node is None else f"{node.name()} ({name})"
            self.line = _line(traceback.format_stack() if node is None else node.metadata.get("traceback_", []))
        return output

    def _is_bad(self, values: Any) -> bool:
        tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        return any(not x.isfinite().all() for x in tensors)


def _line(stack: list[str]) -> str:
    """`file.py:12 in f`: the innermost frame outside of torch and of this module."""
    for entry in reversed(stack):
        head = entry.strip().splitlines()[0]
        file = head.partition('"')[2].partition('"')[0]
        if file and "/torch/" not in file and Path(file) != Path(__file__):
            _, _, rest = head.partition(", line ")
            return f"{Path(file).name}:{rest.replace(', in ', ' in ')}"
    return ""
