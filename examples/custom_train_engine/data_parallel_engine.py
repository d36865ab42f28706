"""A custom training engine: plain data parallelism, written with torch and transformers only.

Every rank holds the whole model and computes its share of the samples; gradients are summed over the ranks. The
objective returns shares of the loss of the whole mini-batch, so the sum of the gradients is that of the mini-batch.
Omitted to keep it short: token budgets, packing, LoRA, value models, offloading, learning-rate schedules.

    python -m verl.trainer.main_ppo ... imports=[examples/custom_train_engine/data_parallel_engine.py] \
        actor_rollout_ref.actor.strategy=data_parallel
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from verl.engines import EngineSpec, MetricSums, MicroBatching, Objective, TrainEngine, register_train_engine
from verl.protocol import DataProto

Tensors = dict[str, torch.Tensor]


class DataParallelEngine(TrainEngine):
    """A causal language model in float32 with AdamW at a constant learning rate."""

    def __init__(self, spec: EngineSpec):
        if spec.kind != "causal_lm":
            raise ValueError(f"strategy=data_parallel trains causal language models, found kind {spec.kind!r}")
        self.spec = spec
        self.dp_rank, self.dp_size = spec.rank, spec.world_size
        if self.dp_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if spec.device.type == "cuda" else "gloo")
        self.module = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32).to(spec.device).eval()
        if spec.optimizer is not None:
            optim = spec.optimizer
            self.optimizer = torch.optim.AdamW(
                self.module.parameters(), lr=optim.lr, betas=tuple(optim.betas), weight_decay=optim.weight_decay
            )

    # ---- computing ----------------------------------------------------------------------------------------------

    def _forward(self, columns: Tensors, outputs: tuple[str, ...], temperature: float) -> Tensors:
        """The requested outputs, each (b, T)."""
        responses = columns["responses"]
        logits = self.module(
            input_ids=columns["input_ids"],
            attention_mask=columns["attention_mask"],
            position_ids=columns["position_ids"],
        ).logits[:, -responses.shape[1] - 1 : -1]  # the logits that predict the response tokens
        log_p = (logits / temperature).log_softmax(-1)
        computed = {"log_probs": log_p.gather(-1, responses[..., None])[..., 0]}
        if "entropys" in outputs:
            computed["entropys"] = -(log_p.exp() * log_p).sum(-1)
        if "sum_pi_squared" in outputs:
            computed["sum_pi_squared"] = log_p.mul(2).exp().sum(-1)
        unknown = set(outputs) - set(computed)
        if unknown:
            raise ValueError(f"strategy=data_parallel does not compute {sorted(unknown)}")
        return {name: computed[name] for name in outputs}

    def _micro_batches(self, batch: DataProto, micro: MicroBatching) -> Iterator[tuple[slice, Tensors]]:
        size = micro.rows or len(batch)
        for start in range(0, len(batch), size):
            rows = slice(start, start + size)
            yield rows, {name: values[rows].to(self.spec.device) for name, values in batch.tensors.items()}

    @torch.no_grad()
    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        width = batch.tensors["responses"].shape[1]
        result = {name: torch.zeros(len(batch), width) for name in outputs}
        answered = batch.tensors["attention_mask"][:, -width:].bool()
        for rows, columns in self._micro_batches(batch, micro):
            for name, values in self._forward(columns, outputs, temperature).items():
                result[name][rows] = values.float().cpu() * answered[rows]
        return result

    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        self.optimizer.zero_grad()
        sums = MetricSums()
        for _, columns in self._micro_batches(batch, micro):
            outputs = self._forward(columns, objective.needs, temperature)
            loss, metrics = objective.loss(outputs, columns)
            loss.backward()
            sums.add(metrics, rows=len(columns["responses"]))
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        if self.dp_size > 1:
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.spec.optimizer.clip_grad or float("inf")).item()
        finite = norm == norm and norm != float("inf")
        if finite:
            self.optimizer.step()
        return sums.result(self.max_over_ranks) | {"grad_norm": norm, "grad_skipped": float(not finite)}

    def lr_step(self) -> float:
        return self.spec.optimizer.lr

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.dp_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.spec.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max_over_ranks(self, values: list[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    # ---- weights ------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in self.module.named_parameters())

    def shared_module(self) -> torch.nn.Module:
        return self.module  # the native and hf rollout engines generate with it, without a copy

    def reference(self) -> AbstractContextManager[None]:
        raise ValueError("strategy=data_parallel trains all weights: the initial ones are gone")

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def save(self, folder: Path, contents: tuple[str, ...], background: bool = False) -> None:
        if self.dp_rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({name: state[name] for name in contents if name in state}, folder / "data_parallel.pt")
            if "hf_model" in contents:
                self.module.save_pretrained(folder / "huggingface")

    def is_saved(self) -> bool:
        return True

    def finish_save(self) -> None:
        """`save` writes in the foreground."""

    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        state = torch.load(folder / "data_parallel.pt", map_location=self.spec.device, weights_only=True)
        if "model" in contents:
            self.module.load_state_dict(state["model"])
        if "optimizer" in contents and "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])


@register_train_engine("data_parallel")
def make_engine(spec: EngineSpec) -> TrainEngine:
    return DataParallelEngine(spec)
