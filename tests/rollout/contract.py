"""What the contract test of rollout engines runs: a tiny model, its trainer, and the bounds of its dtype."""

import copy
import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from tests.engines.ranks import make_engine
from tests.rollout.float64 import float64_logits
from verl.config import schema
from verl.data.sequences import build_sequences
from verl.engines.base import MicroBatching
from verl.protocol import DataProto
from verl.rollout.base import ROLLOUT_ENGINES, RolloutEngine, RolloutEnv, make_rollout_engine
from verl.rollout.request import Completion, Request, SamplingParams, make_requests
from verl.rollout.sampling import check_finite, choose, uniform
from verl.trainer.ppo.canary import Canary, StaleWeightsError
from verl.trainer.ppo.weights import RolloutWeights
from verl.utils.device import resolve_device, resolve_dtype
from verl.weight_sync import ModuleReceiver, ReshardSync, SyncReport
from verl.workers.rollout import role

DEVICE = os.environ.get("VERL_CONTRACT_DEVICE", "cpu")
DTYPE = resolve_dtype(os.environ.get("VERL_CONTRACT_DTYPE", "fp32"), torch.device("cpu"))
IS_FLOAT32 = DTYPE.itemsize == 4
CHOSEN = os.environ.get("VERL_CONTRACT_ENGINES")
MODEL = os.environ.get("VERL_CONTRACT_MODEL")
KWARGS = json.loads(os.environ.get("VERL_CONTRACT_KWARGS", "{}"))
#: SGLang: whether tokens depend on the seed and the sample id only; GPUs only
IS_SEEDED = "enable_deterministic_inference" in KWARGS
#: whether a token may depend on the batch that it is sampled in: two logits are often equal up to rounding
IS_ROUNDED = not IS_FLOAT32 and not IS_SEEDED
BOUND = 2e-5 if DEVICE == "cpu" and not MODEL else 2e-4 if DEVICE == "cpu" else 2e-2
#: of the weights in another push; a deep model amplifies rounding; a power of two is exact in every dtype, and
#: below 1 errors do not grow
SCALE = 0.5 if not IS_FLOAT32 else 1.05 if MODEL else 1.5
#: engines with a package of their own
PACKAGES = {"vllm": "vllm", "sglang": "sglang"}
NAMES = ["fake", *sorted(ROLLOUT_ENGINES)]
STEPPING = ("native", "vllm", "sglang")  # engines that admit and abort requests between steps
PUSHED_BETWEEN_STEPS = ("vllm", "sglang")  # engines that receive weights while requests are running
VOCAB = 53
#: heads of 64 and rows of multiples of 16 bytes, which fused kernels of GPUs need
SHAPE = dict(vocab_size=VOCAB, hidden_size=256, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
SHAPE |= dict(num_key_value_heads=2, max_position_embeddings=512)
#: of the model's folder: no engine may read it, the request says how it is sampled
DEFAULTS = {"do_sample": True, "repetition_penalty": 3.0, "temperature": 0.3, "top_k": 2, "top_p": 0.5}
DEFAULTS |= {"eos_token_id": [*range(0, VOCAB, 4)], "max_new_tokens": 3}
#: config, and the keys in which it differs from SHAPE
FAMILIES = {
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "llama": (LlamaConfig, dict(tie_word_embeddings=False)),
    # kernels for a CPU pad experts of 48 to 64
    "moe": (Qwen3MoeConfig, dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=64)),
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11], [12, 13], [1, 2, 3]]


class Naive(RolloutEngine):
    """A whole forward pass per token, one request after another."""

    def __init__(self, module: torch.nn.Module):
        self.module = module
        self._receiver = ModuleReceiver(module)

    @torch.no_grad()
    def generate(self, requests):
        self._receiver.check_filled()
        return [self._one(request) for request in requests]

    def _one(self, request: Request) -> Completion:
        params, ids, log_probs = request.params, [], []
        while len(ids) < params.max_tokens:
            logits = self.module(torch.tensor([[*request.prompt_ids, *ids]], device=DEVICE)).logits[:, -1]
            sample_id = torch.tensor([request.sample_id], device=DEVICE)
            token, log_prob = draw(logits, params, sample_id, len(ids))
            ids.append(int(token))
            log_probs.append(float(log_prob))
            if ids[-1] in params.active_stop_ids or (params.stop is not None and params.stop.find(ids) is not None):
                return Completion(ids, log_probs, "stop")
        return Completion(ids, log_probs, "length")

    def receiver(self):
        return self._receiver


class Sharded:
    """A training engine that no rollout engine can share a module with."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def shared_module(self):
        return None

    def model_forward(self):
        return None

    def buffers(self):
        return self.module.named_buffers()

    def weights(self, scale: float = 1.0):
        for name, parameter in self.module.named_parameters():
            yield name, parameter.detach() * scale


class Shared(Sharded):
    """A training engine whose module a rollout engine in its process generates with."""

    def shared_module(self):
        return self.module


@torch.no_grad()
def rounding(module: torch.nn.Module, scale: float = 1.0) -> float:
    """Bound of log-probs computed in DTYPE, from those of `module`, which is in float32, with weights times `scale`."""
    if IS_FLOAT32:
        return BOUND if scale == 1 else 5 * BOUND
    exact = copy.deepcopy(module)
    for p in exact.parameters():
        p.mul_(scale)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(module.config.vocab_size, (16, 32), generator=generator).to(DEVICE)
    expected = exact(ids).logits.log_softmax(-1)
    return 2 * float((exact.to(DTYPE)(ids).logits.float().log_softmax(-1) - expected).abs().max())


class Setup:
    """A rollout engine, and the trainer of the same model. Weights have been pushed."""

    def __init__(self, name: str, folder: str):
        self.name = name
        self.trainer = make_engine(folder, device=DEVICE, dtype="fp32", model_dtype="fp32")
        self.source = Sharded(self.trainer.module)
        self.module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE).eval()
        self.bound = rounding(self.module)
        self.model = model = schema.ModelConfig(path=folder)
        limits = dict(max_num_seqs=128, gpu_memory_utilization=0.2, enforce_eager=True, check_every=1)
        kwargs = schema.EngineKwargs(**{name: KWARGS}) if name in PACKAGES else schema.EngineKwargs()
        self.config = schema.RolloutConfig(
            name=name, prompt_length=64, response_length=448, engine_kwargs=kwargs, **limits
        )
        self.env = RolloutEnv(0, 1, 0, resolve_device(DEVICE), 0, DTYPE)
        self.make = partial(make_rollout_engine, name, self.config, model, self.env)
        self.engine = Naive(copy.deepcopy(self.module).to(DTYPE)) if name == "fake" else self.make(self.source)
        if not self.engine.samples_policy:
            pytest.skip("samples_policy = False: its tokens and log-probs are not those of the model")
        with pytest.raises(ValueError, match="has no weights: push them first"):
            self.engine.generate(make_requests(PROMPTS[:1], SamplingParams(2, ())))
        self.push()

    def push(self, scale: float = 1.0) -> None:
        self.engine.receiver().receive(self.source.weights(scale), 1)

    def repeated(self, seed: int) -> dict:
        """Sampling parameters with which the engine repeats its tokens, up to `check_same`."""
        return {"temperature": 0.0} if IS_ROUNDED or (self.name == "sglang" and not IS_SEEDED) else {"seed": seed}

    def check_same(self, prompt: list[int], found: Completion, expected: Completion) -> None:
        """Two responses with `repeated` parameters, of which one may have ended earlier, are the same. If tokens depend
        on rounding: up to a token where both have one of the most likely."""
        pairs = list(zip(found.token_ids, expected.token_ids))
        at = next((t for t, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            return
        assert IS_ROUNDED, f"token {at} differs"
        logits = self.logits(prompt, replace(found, token_ids=found.token_ids[: at + 1]))[-1]
        assert logits.max() - logits[list(pairs[at])].min() <= self.bound, f"token {at} differs"

    def check_all_same(self, found: list[Completion], expected: list[Completion]) -> None:
        for prompt, one, other in zip(PROMPTS, found, expected, strict=True):
            self.check_same(prompt, one, other)
            assert len(one.token_ids) == len(other.token_ids)

    def answers(self, **keys) -> list[Completion]:
        params = SamplingParams(keys.pop("max_tokens", 24), keys.pop("stop_token_ids", ()), **keys)
        return self.engine.generate(make_requests(PROMPTS, params))

    def trainers(self, answers: list[Completion], temperature: float = 1.0) -> list[list[float]]:
        """The trainer's log-probs of the sampled tokens."""
        columns = build_sequences(PROMPTS, [a.token_ids for a in answers], pad_token_id=0)
        found = self.trainer.infer(DataProto.from_dict(columns), ("log_probs",), MicroBatching(), temperature)
        return [row[: len(a.token_ids)].tolist() for row, a in zip(found["log_probs"], answers)]

    @contextmanager
    def scaled(self, scale: float = SCALE) -> Iterator[float]:
        """The trainer has the weights of `push(scale)`. Yields the bound of their log-probs."""
        trained = list(self.trainer.module.parameters())
        before = [p.detach().clone() for p in trained]
        with torch.no_grad():
            for p in trained:
                p.mul_(scale)
            try:
                yield rounding(self.module, scale)
            finally:
                for p, value in zip(trained, before):
                    p.copy_(value)

    @torch.no_grad()
    def logits(self, prompt: list[int], answer: Completion) -> torch.Tensor:
        """(T, V): before each token of the answer."""
        ids = torch.tensor([[*prompt, *answer.token_ids]], device=DEVICE)
        return self.module(ids).logits[0, len(prompt) - 1 : -1].double().cpu()

    def check_same_draws(
        self, prompt: list[int], found: Completion, expected: Completion, params: SamplingParams, sample_id: int
    ) -> None:
        """Two responses to one request are the same. With a real model in float32, sampled by this package: up to a
        token where the random number is at the edge between both, as close as rounding moves the edge."""
        pairs = list(zip(found.token_ids, expected.token_ids, strict=True))
        at = next((t for t, (one, other) in enumerate(pairs) if one != other), None)
        if at is None:
            return
        assert MODEL and self.name in ("native", "hf"), f"token {at} differs"
        until = replace(found, token_ids=found.token_ids[: at + 1])
        bound = self.bounds(prompt, until, params.temperature)[-1]
        probs = (self.logits(prompt, until)[-1] / params.temperature).softmax(-1)
        edges, drawn = probs.cumsum(-1), float(uniform(params.seed, torch.tensor([sample_id]), at))
        for token in pairs[at]:
            assert edges[token] - probs[token] - bound <= drawn <= edges[token] + bound, f"token {at} differs"

    def bounds(self, prompt: list[int], answer: Completion, temperature: float) -> list[float]:
        """The bound of log-probs at each token of the answer.

        With a real model in float32 on a CPU, at least twice the error of the module itself against float64: two
        computations with that error differ by up to twice as much. Some positions amplify rounding.
        """
        if not (MODEL and IS_FLOAT32 and DEVICE == "cpu"):
            return [self.bound] * len(answer.token_ids)
        exact = float64_logits(self.module, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        found, exact = ((each / temperature).log_softmax(-1) for each in (self.logits(prompt, answer), exact))
        return (2 * (found - exact).abs().amax(-1)).clamp_min(self.bound).tolist()


class Run:
    """The pushes of a run that trains and generates in this process: its weight sync, and a canary after each push.

    weights: pushes the trainer's weights to the engine.
    """

    def __init__(self, made: Setup, engine: RolloutEngine, weight_sync: str = "auto"):
        self.made, self.trainer = made, made.trainer
        config = made.config.model_copy(update={"weight_sync": weight_sync, "check_every": 1})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(role, "make_rollout_engine", lambda *args: engine)
            self.rollout = role.Rollout(config, made.model, made.env, stop_token_ids=(), train_engine=self.trainer)
        workers, vocab = {"actor": self, "rollout": self}, made.module.config.vocab_size
        canary = Canary(workers, 1, vocab_size=vocab, prompt_length=64, response_length=448)
        self.weights = RolloutWeights(workers, separate=False, canary=canary)

    # the methods of the workers

    def push_weights(self, version: int) -> list[SyncReport]:
        return [self.rollout.sync_weights(version)]

    def canary_response(self, prompt: list[int], max_tokens: int) -> list[Completion | None]:
        return [self.rollout.canary_response(prompt, max_tokens)]

    def canary_log_probs(self, batch: DataProto) -> list[torch.Tensor]:
        return [self.trainer.infer(batch, ("log_probs",), MicroBatching())["log_probs"]]

    def computes_in_16_bits(self) -> list[bool]:
        return [not IS_FLOAT32]

    def has_compared_weights(self) -> list[bool]:
        return [self.rollout.has_compared_weights()]

    # a fault

    def lose_a_parameter(self, patch: pytest.MonkeyPatch) -> tuple[type[Exception], str]:
        """From now on, the engine keeps the values of a parameter. Returns the error of push 2, and its message."""
        name, sync = "model.layers.1.self_attn.q_proj.weight", self.rollout._sync
        differ = (
            r"weights of version 2 were not loaded: .* {} of \d+ parameters differ from what was sent, first \['{}'"
        )
        if isinstance(sync, ReshardSync):
            patch.setattr(sync, "_transfer", _keeping(sync._plan.names.index(name), sync._transfer))
            text = "weights of version 2 were not loaded: 1 slices differ from the training shards: "
            return ValueError, f"{text}{name} on rank 0"
        engine, receiver = self.rollout.engine, self.rollout.engine.receiver()
        if self.made.name == "vllm":
            from verl.rollout.vllm.weights import engine_model

            fused = name.replace("q_proj", "qkv_proj")
            parameter = dict(engine_model(engine.llm).named_parameters())[fused]
            patch.setattr(parameter, "weight_loader", lambda *args: None, raising=False)
            return StaleWeightsError, "rollout DP rank 0 does not generate with the weights of version 2"
        if self.made.name == "sglang":
            patch.setattr(receiver, "_send", _skipping(name, self.made.module.get_parameter(name), receiver._send))
            return StaleWeightsError, "rollout DP rank 0 does not generate with the weights of version 2"
        parameter = receiver.module.get_parameter(name)
        patch.setattr(parameter, "copy_", lambda sent: parameter)
        return ValueError, differ.format(1, name)


def _keeping(index: int, transfer: Callable) -> Callable:
    """`ReshardSync._transfer` after which a stored tensor has the values of before."""

    def keep(plan, shards, stored):
        old = stored[index].clone()
        corrupted = transfer(plan, shards, stored)
        stored[index].copy_(old)
        return corrupted

    return keep


def _skipping(name: str, other: torch.Tensor, send: Callable) -> Callable:
    """`SglangReceiver._send` as if SGLang's loader skipped a parameter: it gets other values, and no fault of the
    transfer is found."""

    def skip(tensors, *args):
        # in another order: a factor has no effect in models that normalize their queries
        received = [(n, other.flip(0).to(t.device, t.dtype) if n == name else t) for n, t in tensors]
        return send(received, *args)

    return skip


def save_model(family: str, folder) -> str:
    config, keys = FAMILIES[family]
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config(**SHAPE | keys))
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.2)
            p.copy_(p.to(DTYPE))  # represented exactly
    module.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return str(folder)


def kept(
    logits: torch.Tensor, bound: float = 0.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> dict[int, float]:
    """Token -> probability before the filter, for (V,) float64 logits and one filter.

    bound: all tokens that can pass the filter if each log-prob has an error of up to `bound`; below 0: only the tokens
    that pass it with every such error; 0: those that pass it without errors. A token is certainly ranked before
    another if their log-probs differ by more than 2 bound, and a sum of probabilities is exact up to exp(bound).
    """
    ranked, tokens = logits.log_softmax(-1).sort(descending=True)
    mass = torch.cat((ranked.new_zeros(1), ranked.exp().cumsum(0)))
    # of the tokens that are ranked before each: at least those (bound > 0), or at most those (bound < 0)
    before = torch.searchsorted(-ranked, -ranked - 2 * bound, right=bound < 0) - (1 if bound < 0 else 0)
    passed = ranked >= ranked[0] + math.log(max(min_p, 1e-300)) - 2 * bound
    if top_k > 0:
        passed &= before < top_k
    if top_p < 1:
        preceding = mass[before] if bound >= 0 else mass[before + 1] - ranked.exp()
        passed &= (preceding * math.exp(-bound) < top_p) | (before == 0)
    return dict(zip(tokens[passed].tolist(), ranked[passed].exp().tolist()))


def draw(
    logits: torch.Tensor, params: SamplingParams, sample_ids: torch.Tensor, position: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `choose`, with uniforms from `params.seed`, `sample_ids` and `position`.

    Raises:
        ValueError: the logits of a row contain NaN or no finite value; the message names the row.
    """
    uniforms = None if params.greedy else uniform(params.seed, sample_ids, position)
    tokens, log_probs = choose(logits, params, uniforms)
    check_finite(log_probs, range(len(log_probs)), sample_ids.tolist())
    return tokens, log_probs
