"""Tiny mixtures of experts for engines of other libraries, and the experts that they report."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from verl.modeling.moe import install_routing
from verl.rollout.base import RolloutEngine
from verl.rollout.request import Completion, Request, SamplingParams, StopStrings, make_requests

SHAPE = dict(
    vocab_size=53,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=2,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)
QWEN3 = dict(num_experts=8, moe_intermediate_size=64, head_dim=64)
MIXTURES = {
    "qwen3_moe": (Qwen3MoeConfig, QWEN3),
    "mixtral": (MixtralConfig, dict(num_local_experts=8, intermediate_size=64)),
}
#: `vllm` only; SGLang's Qwen3-MoE has experts in every layer
OTHERS = {
    "qwen3_moe with a dense layer": (Qwen3MoeConfig, QWEN3 | dict(mlp_only_layers=[1])),
    "qwen2_moe": (
        Qwen2MoeConfig,
        dict(num_experts=8, moe_intermediate_size=64, shared_expert_intermediate_size=32, intermediate_size=64),
    ),
    "olmoe": (OlmoeConfig, dict(num_experts=8, intermediate_size=64)),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13]]


def save_mixture(family: str, folder: Path) -> torch.nn.Module:
    """Save a model with random weights. Returns it."""
    config, keys = (MIXTURES | OTHERS)[family]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config(**SHAPE | keys), dtype=torch.float32).eval()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.1)
            p.copy_(p.to(torch.bfloat16))  # represented exactly
    module.save_pretrained(folder)
    return module


def expected_experts(module: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Of all tokens but the last, from one forward pass."""
    routing = install_routing(module)
    routing.start(None)
    with torch.no_grad():
        module(torch.tensor([tokens[:-1]]))
    return routing.choices().numpy()


def assert_experts(module: torch.nn.Module, prompt: list[int], completion: Completion, exact: bool = True) -> None:
    """Args: exact: whether all choices are those of the model; otherwise nine of ten, which rounding may change."""
    expected = expected_experts(module, [*prompt, *completion.token_ids])
    found = completion.routed_experts
    assert found.dtype == np.int16 and found.shape == expected.shape
    same = (np.sort(found, -1) == np.sort(expected, -1)).all(-1)
    assert same.all() if exact else same.mean() > 0.9


def check_experts(
    module: torch.nn.Module, requests: Sequence[Request], completions: Sequence[Completion], exact: bool = True
) -> None:
    for request, completion in zip(requests, completions, strict=True):
        assert_experts(module, request.prompt_ids, completion, exact)


def check_mixture(rollout: RolloutEngine, module: torch.nn.Module, exact: bool = True) -> None:
    """The experts of responses of all kinds: of limits, stop tokens and stop strings, and of an aborted one."""
    sampled = SamplingParams(24, (3, 50), seed=5)
    requests = make_requests(PROMPTS * 2, sampled, limits=[24, 1, 9, 24, 16, 3, 2, 24])
    check_experts(module, requests, rollout.generate(requests), exact)
    (whole,) = rollout.generate(make_requests(PROMPTS[:1], greedy := SamplingParams(40, (), temperature=0.0)))
    text = f" {whole.token_ids[11]} {whole.token_ids[12]} "
    stop = StopStrings((text,), lambda ids: "".join(f" {token} " for token in ids).replace("  ", " "))
    (stopped,) = rollout.generate(make_requests(PROMPTS[:1], replace(greedy, stop=stop)))
    assert stopped.finish_reason == "stop" and len(stopped.token_ids) < 40
    assert_experts(module, PROMPTS[0], stopped, exact)

    async def run() -> Completion:
        long = Request(PROMPTS[1], replace(greedy, max_tokens=100), 0, "a")
        task = asyncio.create_task(rollout.generate_one(long))
        await rollout.generate_one(Request([3], replace(greedy, max_tokens=8), 1, "b"))
        rollout.abort(["a"])
        return await task

    aborted = asyncio.run(run())
    assert aborted.finish_reason == "abort" and 0 < len(aborted.token_ids) < 100
    assert_experts(module, PROMPTS[1], aborted, exact)
