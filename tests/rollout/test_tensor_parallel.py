"""The native engine over two ranks generates what it generates on one, and refuses what it cannot split."""

import asyncio
import copy
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engines.ranks import run_on_ranks
from tests.rollout.test_native_families import CASES, PROMPTS, model
from verl.config import schema
from verl.engines.parallel import init_process_group
from verl.rollout.base import RolloutEnv
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.experts import Experts
from verl.rollout.native.factory import make_native
from verl.rollout.native.model import read_decoder
from verl.rollout.native.slices import Slices, check_sizes
from verl.rollout.request import Request, SamplingParams, StopStrings, make_requests
from verl.rollout.tensor_parallel import TensorParallel
from verl.trainer.checks.models import ModelLimits
from verl.utils.coroutines import gather_coroutines, run_coroutine
from verl.weight_sync import ReplicaSync

CPU = torch.device("cpu")
GREEDY = SamplingParams(12, (), temperature=0)
SAMPLED = SamplingParams(12, (3, 50), seed=5, temperature=1.2, top_k=20)
SIZES = {"vocab_size": 96}
FAST = ("llama",)  # biases of all projections; the test of pushes has tied embeddings and one key head
NAMES = [name for name in (*CASES, "one-kv-head") if name != "phi3-longrope"]


def decode(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def make_model(case: str) -> torch.nn.Module:
    more = {"num_key_value_heads": 1} if case == "one-kv-head" else {}
    return model("qwen2" if case == "one-kv-head" else case, **SIZES, **more)


def save(folder: Path, case: str) -> Path:
    make_model(case).save_pretrained(folder / case)
    return folder / case


def engine_of(path: Path, rank: int = 0, size: int = 1, trainer: "Trainer | None" = None) -> NativeRollout:
    env = RolloutEnv(rank, size, rank, CPU, 0, None, tp_rank=rank, tp_size=size)
    section = schema.RolloutConfig(tensor_model_parallel_size=size, prompt_length=40, response_length=24)
    section = section.model_copy(update={"dtype": "fp32"})
    return make_native(section, schema.ModelConfig(path=str(path)), env, trainer)


def answer(engine: NativeRollout, prompts: list[list[int]] = PROMPTS, tokens: int = 12, steps: int = 3) -> dict:
    """What both sizes generate: a batch, then agent loops. steps: before requests are aborted."""
    limits = [1 + (tokens - 1, 2, 8, tokens - 1, 4)[i % 5] for i in range(len(prompts))]
    greedy, sampled = replace(GREEDY, max_tokens=tokens), replace(SAMPLED, max_tokens=tokens)
    answers = {
        "greedy": engine.generate(make_requests(prompts, greedy)),
        "lengths": engine.generate(make_requests(prompts, greedy, limits=limits)),
        "sampled": engine.generate(make_requests(prompts, sampled, limits=limits)),
        "without filter": engine.generate(make_requests(prompts, replace(sampled, top_k=-1, temperature=0.8))),
    }
    stop = StopStrings((decode(answers["greedy"][0].token_ids[4:6]),), decode)
    answers["stop"] = engine.generate(make_requests(prompts[:3], replace(greedy, stop=stop)))

    async def turns(i: int) -> list:
        """Two turns of a conversation; the second prompt is longer than what was asked for so far."""
        first = await engine.generate_one(Request(prompts[i], sampled, i, f"first {i}"))
        await asyncio.sleep(0.001 * i)
        prompt = [*prompts[i], *first.token_ids, *range(10 + i)]
        return [first, await engine.generate_one(Request(prompt, sampled, i, f"second {i}"))]

    async def aborted() -> list:
        long, before = SamplingParams(2 * tokens, (), seed=1), engine.stats
        tasks = [asyncio.ensure_future(engine.generate_one(Request([9, i], long, i, str(i)))) for i in range(4)]
        while engine.stats is before or engine.stats.steps < steps:
            await asyncio.sleep(0)
        engine.abort(["1", "2"])
        return await asyncio.gather(*tasks)

    conversations = run_coroutine(gather_coroutines([turns(i) for i in range(len(prompts))]))
    answers["turns"] = [completion for both in conversations for completion in both]
    answers["aborted"] = run_coroutine(aborted())
    return answers


def together(engine: NativeRollout, act):
    """act(engine) on rank 0; the other ranks follow."""
    if engine.tp.leads:
        with engine.leading():
            return act(engine)
    return engine.follow()


def on_rank(paths: list[Path], prompts: int, tokens: int) -> list:
    """For `run_on_ranks`: the answers on rank 0, and sizes on rank 1."""
    init_process_group(CPU)
    rank, found = torch.distributed.get_rank(), []
    for path in paths:
        engine = engine_of(path, rank, 2)
        answers = together(engine, lambda leader: answer(leader, PROMPTS[:prompts], tokens))
        if rank == 0:
            found.append(answers)
        else:
            found.append(
                {"cache": engine._cache.keys.shape, "parameters": sum(p.numel() for p in engine.module.parameters())}
            )
    return found


def assert_same(found: dict, expected: dict) -> None:
    for kind, answers in expected.items():
        for a, b in zip(found[kind], answers, strict=True):
            if kind == "aborted":
                assert a.finish_reason == b.finish_reason and a.token_ids[:3] == b.token_ids[:3], kind
                continue
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason), kind
            torch.testing.assert_close(torch.tensor(a.log_probs), torch.tensor(b.log_probs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("names", "size"),
    [pytest.param(FAST, (3, 9), id="fast"), pytest.param(NAMES, (5, 12), id="every family", marks=pytest.mark.slow)],
)
def test_two_ranks_generate_what_one_generates(names, size, tmp_path):
    """size: numbers of prompts, and of tokens of a response."""
    paths = [save(tmp_path, name) for name in names]
    leader, follower = run_on_ranks(2, on_rank, paths, *size)
    for path, found, other in zip(paths, leader, follower, strict=True):
        one = engine_of(path)
        expected = answer(one, PROMPTS[: size[0]], size[1])
        assert expected["stop"][0].finish_reason == "stop" and expected["aborted"][1].finish_reason == "abort"
        assert_same(found, expected)
        heads = one._cache.keys.shape[2]
        assert other["cache"][2] == max(1, heads // 2)
        assert other["parameters"] < 0.6 * sum(p.numel() for p in one.module.parameters())


class Trainer:
    """The part of a training engine that a rollout engine in its process uses."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def shared_module(self):
        return self.module

    def model_forward(self):
        return None

    def buffers(self):
        return self.module.named_buffers()

    def rollout_weights(self, dtype):
        return ((name, p.detach()) for name, p in self.module.named_parameters())


def pushes_on_rank(path: Path) -> dict:
    """For `run_on_ranks`: what is generated before and after pushes, and which errors are raised."""
    init_process_group(CPU)
    rank = torch.distributed.get_rank()
    trainer, found = Trainer(make_model("one-kv-head")), {}
    engine = engine_of(path, rank, 2, trainer)
    requests = make_requests(PROMPTS, GREEDY)

    def generate(name: str) -> None:
        try:
            found[name] = together(engine, lambda leader: leader.generate(requests))
        except ValueError as error:
            found[name] = str(error)

    generate("before the first push")
    for version, scale in enumerate((1.0, 1.1)):
        for p in trainer.module.parameters():
            p.data.mul_(scale)
        ReplicaSync(engine).push(trainer, version)
        generate(f"version {version}")
    engine.sleep()
    engine.wake()
    generate("after sleep")
    engine.cache_bytes = 10**6 if rank else 100
    engine.free()
    generate("too little memory")
    engine.cache_bytes = None
    generate("after an error")
    if rank == 1:
        generate_alone = [lambda: engine.generate(requests), lambda: run_coroutine(engine.generate_one(requests[0]))]
        for name, call in zip(("generate", "generate_one"), generate_alone):
            try:
                call()
            except ValueError as error:
                found[name] = str(error)
    wrong = {name: p.new_zeros(3) if name.endswith("q_proj.weight") else p for name, p in trainer.rollout_weights(None)}
    try:
        engine.receiver().receive(wrong.items(), 2)
    except ValueError as error:
        found["wrong shape"] = str(error)
    engine.receiver().release()
    generate("after release")
    if rank == 0:
        with pytest.raises(RuntimeError) as caught, engine.leading(), engine.tp.operation():
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        found["error"] = type(caught.value)
    return found


def test_pushed_weights_are_generated_with_and_errors_reach_both_ranks(tmp_path):
    path = save(tmp_path, "one-kv-head")
    leader, follower = run_on_ranks(2, pushes_on_rank, path)
    module, expected = make_model("one-kv-head"), []
    for scale in (1.0, 1.1):
        for p in module.parameters():
            p.data.mul_(scale)
        expected.append(NativeRollout(module).generate(make_requests(PROMPTS, GREEDY)))
    assert_same(
        {"first": leader["version 0"], "second": leader["version 1"]}, {"first": expected[0], "second": expected[1]}
    )
    assert leader["version 0"] != leader["version 1"]
    assert leader["after sleep"] == leader["version 1"] == leader["after an error"]
    for found in (leader, follower):
        assert "has no weights: push them first" in found["before the first push"]
        assert "has no weights: push them first" in found["after release"]
        assert "q_proj.weight has shape (3,), expected (32, 32)" in found["wrong shape"]
    assert "the KV cache has 100 bytes" in leader["too little memory"]
    assert leader["error"] is torch.OutOfMemoryError, "the cause, not that the group has no connection afterwards"
    for name in ("generate", "generate_one"):
        assert f"{name}() was called on rank 1 of a tensor-parallel group: call follow()" in follower[name]


def failing_on_rank(path: Path, failing: int) -> list[tuple[str, str, float]]:
    """For `run_on_ranks`: the errors of two calls, of which one rank has no memory for the first."""
    init_process_group(CPU)
    rank, found = torch.distributed.get_rank(), []
    engine = engine_of(path, rank, 2)
    if rank == failing:

        def out_of_memory(self, x):
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

        TensorParallel.all_reduce = out_of_memory
    for _ in range(2):
        start = time.monotonic()
        try:
            together(engine, lambda leader: leader.generate(make_requests(PROMPTS, GREEDY)))
        except RuntimeError as error:
            found.append((type(error).__name__, str(error), time.monotonic() - start))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_no_rank_waits_for_one_that_has_failed(failing, tmp_path):
    ranks = run_on_ranks(2, failing_on_rank, save(tmp_path, "one-kv-head"), failing)
    named = f"rank {failing} of the tensor-parallel group failed: OutOfMemoryError: tried to allocate 2 GiB"
    own = ranks[failing][0]
    assert own[:2] == ("OutOfMemoryError", "tried to allocate 2 GiB")
    assert [error[:2] for error in ranks[1 - failing]] == [("RuntimeError", named)] * 2
    assert ranks[failing][1][:2] == ("RuntimeError", named)
    assert all(seconds < 10 for errors in ranks for _, _, seconds in errors)


@pytest.mark.parametrize("case", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_slices_of_all_ranks_are_the_parameters(case, ranks):
    module = make_model(case)
    slices = [Slices(module.config, TensorParallel(rank, ranks)) for rank in range(ranks)]
    config = module.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = module.model.layers[0].self_attn.head_dim
    copies = max(1, ranks // kv_heads)
    for name, full in module.named_parameters():
        parts = [own.slice_of(name, full) for own in slices]
        layer = name.split(".")[-2]
        if layer in ("q_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head", "experts"):
            assert torch.equal(torch.cat(parts), full), name
        elif layer in ("k_proj", "v_proj"):
            assert torch.equal(torch.cat(parts[::copies]), full) and torch.equal(parts[0], parts[copies - 1]), name
        elif layer == "qkv_proj":
            q, k, v = full.split([heads * size, kv_heads * size, kv_heads * size])
            of_rank = [part.split([heads // ranks * size] + [max(1, kv_heads // ranks) * size] * 2) for part in parts]
            for i, whole in enumerate((q, k, v)):
                assert torch.equal(torch.cat([own[i] for own in of_rank][:: copies if i else 1]), whole), name
        elif layer == "gate_up_proj":
            both = [torch.cat([part.chunk(2)[i] for part in parts]) for i in range(2)]
            assert torch.equal(torch.cat(both), full), name
        elif layer in ("o_proj", "down_proj"):
            bias = name.endswith("bias")
            assert torch.equal(sum(parts) if bias else torch.cat(parts, 1), full), name
        else:
            assert all(part is full for part in parts), name


def test_the_experts_of_two_ranks_add_up_to_those_of_the_model():
    module = make_model("mixtral")

    def experts_of(tp: TensorParallel) -> Experts:
        own, slices = copy.deepcopy(module), Slices(module.config, tp)
        for name, p in own.named_parameters():
            p.data = slices.slice_of(name, p.data)
        return read_decoder(own, tp=tp).layers[0].experts

    x, whole = torch.randn(6, module.config.hidden_size), experts_of(TensorParallel())
    experts = module.model.layers[0].mlp.experts
    shared, copied = (read_decoder(module, dtype).layers[0].experts for dtype in (None, torch.float64))
    for name in ("gate_up", "down"):  # they are the parameters, unless these have another dtype
        parameter = getattr(experts, f"{name}_proj")
        assert getattr(shared, name).data_ptr() == parameter.data_ptr()
        assert torch.equal(getattr(copied, name), parameter.double())
    chosen, weights = whole.route(x)
    parts = [experts_of(TensorParallel(rank, 2)).outputs(x, chosen, weights, torch.relu) for rank in range(2)]
    torch.testing.assert_close(sum(parts), whole.outputs(x, chosen, weights, torch.relu))


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        ({}, 3, r"tensor_model_parallel_size=3 does not divide the model's num_attention_heads=4: use 1 or 2"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "does not divide the model's num_key_value_heads=3"),
        ({"vocab_size": 97}, 2, "does not divide the model's vocab_size=97: use 1"),
        ({"num_local_experts": 3}, 2, "does not divide the model's num_local_experts=3: use 1"),
        ({"intermediate_size": 49}, 2, "does not divide the model's intermediate_size=49: use 1"),
    ],
)
def test_a_model_that_cannot_be_split_is_refused(sizes, ranks, message):
    known = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 96}
    known["hidden_act"] = "silu"
    with pytest.raises(ValueError, match=message):
        check_sizes(known | sizes, ranks)
    check_sizes(known, 4)  # two ranks have the same key/value head
    limits = ModelLimits("model", 96, None, ("Qwen2ForCausalLM",), known | sizes)
    with pytest.raises(ValueError, match=message):
        limits.check_engine(schema.RolloutConfig(tensor_model_parallel_size=ranks))
    limits.check_engine(schema.RolloutConfig())
    limits.check_engine(schema.RolloutConfig(tensor_model_parallel_size=ranks, name="mine"))
