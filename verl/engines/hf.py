"""The training engine of one device: a HuggingFace causal language model, or a critic on the same trunk."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from verl.engines import attention
from verl.engines.base import MicroBatching, Objective, OptimizerConfig, Tensors, TrainEngine
from verl.engines.logits import token_statistics
from verl.engines.metrics import MetricSums
from verl.engines.micro_batch import ModelInput, build_input, plan, row_lengths
from verl.protocol import DataProto

logger = logging.getLogger("verl.engines")

_READS = ("input_ids", "attention_mask", "position_ids", "responses")


@dataclass(frozen=True)
class ModelConfig:
    """Where a model comes from and how it computes.

    path: HuggingFace id or folder. kind: "causal_lm" (policy, reference) or "value" (critic: one number per token).
    model_dtype: dtype of the parameters. compute_dtype: dtype of the forward pass (autocast when it differs).
    override_config: values set in the HuggingFace config. use_remove_padding: packed rows.
    random_init: weights from the config and the seed, nothing loaded (tests, benchmarks).
    """

    path: str
    kind: str = "causal_lm"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    model_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    gradient_checkpointing: bool = False
    use_remove_padding: bool = True
    trust_remote_code: bool = False
    override_config: tuple[tuple[str, Any], ...] = ()
    random_init: bool = False


def load_module(config: ModelConfig) -> torch.nn.Module:
    """The model of `config`, dropout off. Raises ValueError that names the path when it cannot be loaded."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    auto = {"causal_lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}[config.kind]
    try:
        hf = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    except OSError as error:
        raise ValueError(f"no HuggingFace model at {config.path!r}: {error}") from error
    # dropout would make the log-probs of one and the same weights differ from pass to pass
    off = {k: 0.0 for k in hf.to_dict() if "dropout" in k or k in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    for name, value in {**off, **dict(config.override_config)}.items():
        setattr(hf, name, value)
    if config.kind == "value":
        hf.num_labels = 1
    build: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.use_remove_padding:
        build["attn_implementation"] = attention.NAME
    if config.random_init:
        module = auto.from_config(hf, **build).to(config.model_dtype)
    else:
        module = _from_pretrained(auto, config, hf, build)
    return module.to(config.device)


def _from_pretrained(auto: Any, config: ModelConfig, hf: Any, build: dict[str, Any]) -> torch.nn.Module:
    """Load weights, and refuse a checkpoint that leaves some of them random."""
    from transformers.utils import logging as hf_logging

    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # its table of missing keys is answered below
    try:
        module, report = auto.from_pretrained(
            config.path, config=hf, dtype=config.model_dtype, output_loading_info=True, **build
        )
    finally:
        hf_logging.set_verbosity(verbosity)
    missing = set(report["missing_keys"])
    new_head = {name for name in missing if name.startswith("score.")} if config.kind == "value" else set()
    if missing - new_head or report["mismatched_keys"]:
        raise ValueError(
            f"{config.path!r} lacks weights of {type(module).__name__}, which would stay random: "
            f"missing {sorted(missing - new_head)[:5]}, of other shape {sorted(map(str, report['mismatched_keys']))[:5]}"
        )
    if new_head:
        # values start at 0, not at noise: the first advantages are then the returns themselves
        logger.info("%s has no value head: a new one starts at 0", config.path)
        for name in new_head:
            torch.nn.init.zeros_(module.get_parameter(name))
    return module


def trunk_and_head(module: torch.nn.Module, kind: str) -> tuple[torch.nn.Module, Callable]:
    """The decoder that gives hidden states, and the function from them to logits or values.

    Raises ValueError for an architecture whose logits are not its last projection of the hidden states (and, where the
    config says so, their soft-capping): log-probs computed here would silently be others than the model's.
    """
    trunk = module.base_model
    if kind == "value":
        return trunk, module.score
    projection = module.get_output_embeddings()
    softcap = module.config.to_dict().get("final_logit_softcapping")

    def head(states: torch.Tensor) -> torch.Tensor:
        logits = projection(states)
        return softcap * torch.tanh(logits / softcap) if softcap is not None else logits

    with torch.no_grad():
        ids = torch.arange(min(4, module.config.vocab_size), device=module.device)[None]
        implementation = module.config._attn_implementation
        module.set_attn_implementation("eager")
        expected, ours = module(ids).logits, head(trunk(ids).last_hidden_state)
        module.set_attn_implementation(implementation)
    if not torch.allclose(expected.float(), ours.float(), rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"{type(module).__name__} changes its logits after the last projection in a way this engine does not know; "
            "its log-probs would be wrong here"
        )
    return trunk, head


class HFEngine(TrainEngine):
    """One device, one model. Parameters in model_dtype (float32 masters), compute in compute_dtype."""

    def __init__(
        self, config: ModelConfig, optimizer: OptimizerConfig | None = None, module: torch.nn.Module | None = None
    ):
        """optimizer: None builds a model for inference only. module: a ready model instead of loading one."""
        self.config = config
        self.module = module if module is not None else load_module(config)
        self.trunk, self.head = trunk_and_head(self.module, config.kind)
        self.vocab_size = self.module.config.vocab_size
        self.optimizer_config = optimizer
        self.module.train(optimizer is not None and config.gradient_checkpointing)
        if optimizer is None:
            self.module.requires_grad_(False)
            return
        if config.gradient_checkpointing:
            self.module.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=config.device.type == "cuda" or None,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_multiplier(optimizer))

    # ---- computing ----------------------------------------------------------------------------------------------

    def infer(
        self, batch: DataProto, outputs: tuple[str, ...], micro: MicroBatching, temperature: float = 1.0
    ) -> Tensors:
        columns = _columns(batch, _READS)
        lengths = row_lengths(columns["attention_mask"])
        found = {name: torch.zeros(columns["responses"].shape, dtype=torch.float32) for name in outputs}
        with torch.no_grad():
            for rows in plan(lengths, micro):
                model_input = self._input(columns, rows)
                for name, values in self._outputs(model_input, outputs, temperature).items():
                    found[name][rows] = values.float().cpu()
        return found

    def train_batch(
        self, batch: DataProto, objective: Objective, micro: MicroBatching, temperature: float = 1.0
    ) -> dict[str, Any]:
        columns = batch.tensors
        lengths = row_lengths(columns["attention_mask"])
        sums = MetricSums()
        self.optimizer.zero_grad(set_to_none=True)
        for rows in plan(lengths, micro):
            share = {name: values[rows].to(self.config.device) for name, values in columns.items()}
            outputs = self._outputs(self._input(share, None), objective.needs, temperature)
            loss, metrics = objective.loss(outputs, share)
            loss.backward()
            sums.add(metrics, rows=len(rows))
        return sums.result() | self._step()

    def _step(self) -> dict[str, float]:
        """Clip, and step unless the gradient is broken."""
        limit = self.optimizer_config.clip_grad
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, limit if limit is not None else math.inf).item()
        if not math.isfinite(norm):
            logger.warning("the gradient's norm is %s: this update is skipped", norm)
            self.optimizer.zero_grad(set_to_none=True)
            return {"grad_norm": norm, "grad_skipped": 1.0}
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": norm, "grad_skipped": 0.0}

    def _input(self, columns: Tensors, rows: list[int] | None) -> ModelInput:
        chosen = {k: columns[k] if rows is None else columns[k][rows].to(self.config.device) for k in _READS}
        return build_input(chosen, self.config.use_remove_padding)

    def _outputs(self, model_input: ModelInput, outputs: tuple[str, ...], temperature: float) -> Tensors:
        """Each asked output, (b, T) with gradient where that is enabled."""
        extra = {"packing": model_input.packing} if model_input.packing is not None else {}
        autocast = self.config.compute_dtype not in (self.config.model_dtype, torch.float64)
        with torch.autocast(self.config.device.type, self.config.compute_dtype, enabled=autocast):
            hidden = self.trunk(
                input_ids=model_input.input_ids,
                attention_mask=model_input.attention_mask,
                position_ids=model_input.position_ids,
                use_cache=False,
                **extra,
            ).last_hidden_state
            states = hidden.flatten(0, 1)[model_input.states]
            if self.config.kind == "value":
                found = {"values": self.head(states)[:, 0]}
                if set(outputs) != {"values"}:
                    raise ValueError(f"a critic gives values, not {sorted(set(outputs) - {'values'})}")
            else:
                found = token_statistics(states, model_input.targets, self.head, self.vocab_size, outputs, temperature)
        wide = torch.float64 if self.config.model_dtype == torch.float64 else torch.float32
        return {name: model_input.scatter(values.to(wide)) for name, values in found.items()}

    def lr_step(self) -> float:
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        return rate

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        return list(values)

    # ---- weights ------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter((name, p.detach()) for name, p in self.module.named_parameters())

    def save(self, folder: Path, contents: tuple[str, ...]) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if {"model", "hf_model"} & set(contents):
            self.module.save_pretrained(folder / "huggingface")
        else:
            self.module.config.save_pretrained(folder / "huggingface")
        if "optimizer" in contents:
            torch.save(self.optimizer.state_dict(), folder / "optimizer.pt")
        if "extra" in contents:
            torch.save({"schedule": self.schedule.state_dict()}, folder / "extra.pt")

    def load(self, folder: Path, contents: tuple[str, ...]) -> None:
        folder = Path(folder)
        if "model" in contents:
            load_weights(self.module, folder / "huggingface")
        if "optimizer" in contents:
            self.optimizer.load_state_dict(_read(folder / "optimizer.pt", self.config.device))
        if "extra" in contents:
            self.schedule.load_state_dict(_read(folder / "extra.pt", torch.device("cpu"))["schedule"])


def _columns(batch: DataProto, names: tuple[str, ...]) -> Tensors:
    return {name: batch.column(name) for name in names}


def _read(path: Path, device: torch.device) -> Any:
    if not path.is_file():
        raise ValueError(
            f"the checkpoint has no {path.name} (looked at {path}); was it saved without it (save_contents)?"
        )
    return torch.load(path, map_location=device, weights_only=True)


def load_weights(module: torch.nn.Module, folder: Path) -> None:
    """Copy the safetensors of a HuggingFace folder into `module`, every parameter exactly once."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"the checkpoint has no weights: no *.safetensors in {folder}")
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    present = dict(module.named_parameters(remove_duplicate=False))
    tied = {id(p) for name, p in present.items() if name in saved}
    missing = [name for name, p in present.items() if name not in saved and id(p) not in tied]
    unknown = sorted(set(saved) - set(present) - {name for name, _ in module.named_buffers()})
    shapes = [n for n in saved if n in present and saved[n].shape != present[n].shape]
    if missing or unknown or shapes:
        raise ValueError(
            f"{folder} holds another model than {type(module).__name__} here: "
            f"missing {missing[:3]}, unknown {unknown[:3]}, of other shape {shapes[:3]}"
        )
    with torch.no_grad():
        for name, tensor in saved.items():
            if name in present:
                present[name].copy_(tensor)


def lr_multiplier(config: OptimizerConfig) -> Callable[[int], float]:
    """step -> factor on the learning rate: linear warm-up, then constant or cosine."""
    known = ("constant", "cosine")
    if config.lr_scheduler_type not in known:
        raise ValueError(f"lr_scheduler_type: expected one of {known}, found {config.lr_scheduler_type!r}")
    warmup, total = config.lr_warmup_steps, config.total_training_steps
    if config.lr_scheduler_type == "cosine" and total <= warmup:
        raise ValueError(f"a cosine schedule needs more total steps ({total}) than warm-up steps ({warmup})")

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.lr_scheduler_type == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / (total - warmup))
        wave = 0.5 * (1 + math.cos(2 * math.pi * config.num_cycles * progress))
        return config.min_lr_ratio + (1 - config.min_lr_ratio) * wave

    return factor
