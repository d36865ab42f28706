"""A custom training engine in one file: plain PyTorch on one device, padded batches.

    python -m verl.trainer.main_ppo 'imports=[examples/custom_train_engine/plain_engine.py]' \
        actor_rollout_ref.actor.strategy=plain ...

`imports` loads this file in every process; `@register_train_engine` makes the strategy known. `infer`, `train_batch`,
`lr_step`, `weights` and the checkpoint methods are all that a run needs. Left out: packing, adapters, value models,
offloading, several ranks.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl.engines import EngineSpec, MicroBatching, Objective, TrainEngine, register_train_engine
from verl.engines.metrics import MetricSums
from verl.protocol import DataProto

Tensors = dict[str, torch.Tensor]


class PlainEngine(TrainEngine):
    """A causal language model with AdamW and a constant learning rate. `spec`: what the run asks for."""

    def __init__(self, spec: EngineSpec):
        if spec.kind != "causal_lm" or spec.world_size > 1:
            raise ValueError(
                f"strategy=plain: expected one causal_lm on one rank, found {spec.kind}, {spec.world_size}"
            )
        self.device = spec.device
        self.module = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32).to(spec.device).eval()
        self.optim = spec.optimizer
        if spec.optimizer is not None:
            optim, parameters = spec.optimizer, self.module.parameters()
            self.optimizer = torch.optim.AdamW(parameters, optim.lr, optim.betas, weight_decay=optim.weight_decay)

    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        with torch.no_grad():
            found = [self._forward(rows, outputs, temperature) for rows in self._split(batch, micro)]
        return {name: torch.cat([each[name] for each in found]).cpu() for name in outputs}

    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        sums = MetricSums()
        for rows in self._split(batch, micro):
            loss, metrics = objective.loss(self._forward(rows, objective.needs, temperature), rows)
            loss.backward()  # the shares of the micro-batches add up to the gradient of the mini-batch
            sums.add(metrics, rows=len(rows["responses"]))
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.optim.clip_grad).item()
        skipped = norm != norm or norm == float("inf")
        if not skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return sums.result() | {"grad_norm": norm, "grad_skipped": float(skipped)}

    def _split(self, batch: DataProto, micro: MicroBatching) -> Iterator[Tensors]:
        """Tensor columns of each micro-batch, on the device. A token budget is turned into rows of full length."""
        columns = {name: batch.column(name) for name in batch.tensors}
        count, length = columns["input_ids"].shape
        tokens = 16384 if micro.tokens == "auto" else micro.tokens
        rows = micro.rows or (max(1, tokens // length) if tokens is not None else count)
        for start in range(0, count, rows):
            yield {name: column[start : start + rows].to(self.device) for name, column in columns.items()}

    def _forward(self, rows: Tensors, outputs: tuple[str, ...], temperature: float) -> Tensors:
        """Each requested output, (b, T), 0 outside the response."""
        width = rows["responses"].shape[1]
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = self.module(**inputs).logits[:, -width - 1 : -1].float() / temperature  # t predicts response token t
        log_p, mask = logits.log_softmax(-1), rows["attention_mask"][:, -width:]
        formulas = {
            "log_probs": lambda: log_p.gather(-1, rows["responses"][..., None])[..., 0],
            "entropys": lambda: -(log_p.exp() * log_p).sum(-1),
            "sum_pi_squared": lambda: log_p.exp().square().sum(-1),
        }
        return {name: formulas[name]() * mask for name in outputs}

    def lr_step(self) -> float:
        return self.optim.lr

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return values

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return values

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach()

    def shared_module(self) -> torch.nn.Module:
        return self.module  # rollout.name=native and hf generate with it directly

    def reference(self) -> AbstractContextManager[None]:
        raise ValueError("all weights are trained, so those that training started from are gone")

    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        self.module.save_pretrained(folder / "huggingface")
        if "optimizer" in contents:
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")

    def is_saved(self) -> bool:
        return True

    def finish_save(self) -> None:
        """Nothing is written in the background."""

    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        saved = AutoModelForCausalLM.from_pretrained(folder / "huggingface", dtype=torch.float32)
        self.module.load_state_dict(saved.state_dict())
        if "optimizer" in contents:
            self.optimizer.load_state_dict(torch.load(folder / "optimizer.pt", map_location=self.device))


@register_train_engine("plain")
def make(spec: EngineSpec) -> TrainEngine:
    return PlainEngine(spec)
