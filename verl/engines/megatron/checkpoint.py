"""The checkpoint of a `MegatronEngine`.

huggingface/      config, and the weights if `hf_model` is in save_contents
megatron/N.pt     the weights and optimizer state of rank N, with the parallel sizes they belong to
extra.pt          the learning-rate schedule
"""

from pathlib import Path
from typing import Any

import torch

from verl.engines.megatron.runtime import ParallelRanks


def sizes_of(ranks: ParallelRanks) -> dict[str, int]:
    """The layout that the file of a rank belongs to."""
    return {"tensor": ranks.t_size, "pipeline": ranks.p_size, "context": ranks.c_size, "data": ranks.d_size}


def model_state(chunks: list[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    """The parameters of this rank."""
    return [{name: p.detach().cpu() for name, p in chunk.named_parameters()} for chunk in chunks]


def optimizer_state(optimizer: Any) -> list[dict[str, Any]]:
    """State and master weights of each optimizer of this rank."""
    return [
        {"state": one.state_dict()["state"], "main": [p.detach().cpu() for p in _parameters(one)]}
        for one in _optimizers(optimizer)
    ]


def write_rank(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Write the file of one rank."""
    (folder / "megatron").mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / "megatron" / f"{rank}.pt")


def read_rank(folder: Path, rank: int, ranks: ParallelRanks) -> dict[str, Any]:
    """Read the file of one rank. Raises ValueError if there is none, or the parallel sizes differ."""
    path, sizes = folder / "megatron" / f"{rank}.pt", sizes_of(ranks)
    if not path.is_file():
        raise ValueError(
            f"the checkpoint has no file {path}: expected a checkpoint of strategy=megatron with parallel sizes {sizes}"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if state["sizes"] != sizes:
        raise ValueError(
            f"{path} was saved with parallel sizes {state['sizes']}, this run has {sizes}: resume with the sizes of "
            "the checkpoint, or start a new run from its huggingface folder (checkpoint.save_contents with hf_model)"
        )
    return state


@torch.no_grad()
def load_model_state(chunks: list[torch.nn.Module], state: list[dict[str, torch.Tensor]], folder: Path) -> None:
    """Restore the parameters of this rank."""
    for chunk, saved in zip(chunks, state, strict=True):
        own = dict(chunk.named_parameters())
        wrong = [name for name, p in own.items() if name not in saved or saved[name].shape != p.shape]
        if wrong or len(saved) != len(own):
            raise ValueError(f"{folder} is of a different model: {wrong[:3] or sorted(set(saved) - set(own))[:3]}")
        for name, parameter in own.items():
            parameter.copy_(saved[name])


@torch.no_grad()
def load_optimizer_state(optimizer: Any, state: list[dict[str, Any]]) -> None:
    """Restore state and master weights; learning rate and weight decay stay those of this run."""
    for one, saved in zip(_optimizers(optimizer), state, strict=True):
        one.load_state_dict({"state": saved["state"], "param_groups": one.state_dict()["param_groups"]})
        for parameter, value in zip(_parameters(one), saved["main"], strict=True):
            parameter.copy_(value)


def _optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of torch inside megatron-core's; a rank may have none."""
    return [one.optimizer for one in optimizer.chained_optimizers if one.optimizer is not None]


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
