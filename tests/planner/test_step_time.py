"""Seconds of a step. Formulas: by hand, on a device with round rates. Constants: by records, counts and limits that do
not come from the code.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.test_planner import H200, TINY, job_of
from verl.config import load_config
from verl.planner.devices import GIB
from verl.planner.placement import plan_groups
from verl.planner.shapes import VisionShape, built_in
from verl.planner.step_time import (
    PIXEL_RATE,
    all_reduce_seconds,
    collective_seconds,
    forward_pass,
    generation_seconds,
    infer_seconds,
    matmul_rate,
    push_seconds,
    update_seconds,
)
from verl.planner.workload import Layout, Tokens
from verl.trainer.checks.planning import job_of as settings_job

ROOT = Path(__file__).parents[2]
#: 900 parameters of the tower in 3 layers of hidden size 16 and MLP 32; 4 patches of a token, 12 values of a patch
SEEING = replace(TINY, vision=VisionShape(1000, 900, 3, 16, 32, 4, 12))
#: TFLOP/s for matmuls, 2 TFLOP/s for attention, 1 TB/s of memory, 1 GB/s between devices, nothing else takes time
ROUND = replace(
    H200,
    **{"matmul": 1e12, "attention": 2e12, "attention_half": 0.0, "bandwidth": 1e12, "link": 1e9, "node_link": 1e9},
    **dict.fromkeys(
        ["latency", "layer_seconds", "decode_seconds", "step_seconds", "push_seconds", "update_seconds"], 0.0
    ),
    sharded_layer_seconds=0.0,
)
#: memory and attention take no time
MATMULS = replace(ROUND, bandwidth=1e30, attention=1e30)
MEMORY = replace(ROUND, matmul=1e30, attention=1e30)


# ---- formulas -------------------------------------------------------------------------------------------------------


def test_collectives_by_hand():
    # each of 4 devices receives 3/4 of 4 GB, and in an all-reduce twice; log2(4) hops of a millisecond
    slow = replace(ROUND, latency=1e-3)
    assert collective_seconds(4e9, 4, slow) == pytest.approx(3.002)
    assert all_reduce_seconds(4e9, 4, slow) == pytest.approx(6.002)
    assert all_reduce_seconds(4e9, 1, slow) == collective_seconds(4e9, 1, slow) == 0


def test_a_forward_pass_by_hand():
    """2 FLOPs per parameter and token (HybridFlow: inference 2 P T), and causal attention."""
    job = job_of(prompt_tokens=100, response_tokens=50)
    found = forward_pass(replace(job.role("actor"), shape=replace(TINY, head_dim=128)), Tokens(100, 50), job, ROUND, 1)
    # heads of 128: q and o 8 x 512, k and v 8 x 256; the MLP 3 x 8 x 16; 2 layers; the head 8 x 32 for responses
    assert found.matmul * 1e12 == 2 * (150 * 2 * (2 * 4096 + 2 * 2048 + 384) + 50 * 256)
    # a token attends to itself and those before it: two matmuls with 2 FLOPs per element of 4 heads of 128
    pairs = 150 * 151 / 2
    assert found.attention * 2e12 == pytest.approx(2 * 2 * 512 * 2 * pairs, rel=0.02)
    one = forward_pass(job.role("actor"), Tokens(100, 50), job, ROUND, 1)
    two = forward_pass(job.role("actor"), Tokens(200, 100), job, ROUND, 1)
    for name in ("matmul", "attention", "elementwise"):
        assert getattr(two, name) == pytest.approx(2 * getattr(one, name))


def test_training_has_three_times_the_flops_of_a_forward_pass():
    """6 P T against 2 P T; without gradients of the weights, which adapters do not need, twice; checkpoints: 4/3."""
    job = job_of(built_in("0.5B"), prompts=8)
    actor = replace(job.role("actor"), checkpointing=False)
    forward = infer_seconds(job, actor, MATMULS)
    assert update_seconds(job, actor, MATMULS) == pytest.approx(3 * forward)
    assert update_seconds(job, replace(actor, checkpointing=True), MATMULS) == pytest.approx(4 * forward)
    adapted = replace(actor, lora_rank=1)
    ratio = update_seconds(job, adapted, MATMULS) / infer_seconds(job, adapted, MATMULS)
    assert ratio == pytest.approx(2)
    assert update_seconds(job, replace(actor, epochs=3), MATMULS) == pytest.approx(9 * forward)


def test_pushes_by_hand():
    """TINY has 1704 parameters in 16 bits. Shards of 4 ranks are gathered, or what a rank of the engine lacks."""
    job = job_of(engine="native")
    four = replace(job.role("actor"), layout=Layout(4))
    assert push_seconds(job, four, ROUND, four) == pytest.approx(2 * 1704 * 3 / 4 / 1e9)
    megatron = replace(job, model_parallel=True, rollout_tensor=2)
    sharded = replace(four, layout=Layout(4, tensor=2, pipeline=2))
    assert push_seconds(megatron, sharded, ROUND, sharded) == pytest.approx(2 * 1704 * (4 - 2) / (2 * 4) / 1e9)
    assert push_seconds(job, four, ROUND, replace(four, name="rollout")) == pytest.approx(2 * 1704 / 1e9)


def test_a_forward_pass_with_images_by_hand():
    tokens, job = Tokens(100, 50), job_of(SEEING, prompt_tokens=50)
    text = forward_pass(job_of(TINY).role("actor"), tokens, replace(job, roles=job_of(TINY).roles), ROUND, 1)
    found = forward_pass(job.role("actor"), tokens, job, ROUND, 1)
    # 100 prompt tokens are 400 patches, each multiplied with 900 parameters
    assert (found.matmul - text.matmul) * 1e12 == pytest.approx(720_000)
    # 200 patches of an image attend to each other, in both directions: 4 FLOPs per element of 16, pair and layer
    rate = ROUND.attention_rate(200, 64)
    assert (found.attention - text.attention) * rate == pytest.approx(4 * 16 * 3 * 2 * 200 * 200)
    assert found.images == 400 * 12 * 4 / PIXEL_RATE and text.images == 0
    assert found.seconds(ROUND) == pytest.approx(replace(found, images=0).seconds(ROUND) + found.images)
    # the host copies the pixels of every patch
    assert forward_pass(job.role("actor"), Tokens(200, 50), job, ROUND, 1).images == 2 * found.images


# ---- constants ------------------------------------------------------------------------------------------------------


def test_the_optimizer_reads_and_writes_the_bytes_of_adamw():
    """In float32: the norm reads the gradient, clipping reads and writes it, AdamW reads weight, gradient and two
    moments and writes all but the gradient, which is then set to zero."""
    job = job_of(built_in("0.5B"), prompts=8)
    actor = replace(job.role("actor"), checkpointing=False)
    frozen = update_seconds(job, replace(actor, trains=False), MEMORY)
    more = update_seconds(job, actor, MEMORY) - frozen
    assert more == pytest.approx(494032768 * 4 * (1 + 2 + 4 + 3 + 1) / 1e12)


def test_offloading_moves_weights_and_moments_over_pcie():
    """There and back, 3 tensors in float32: slower than PCIe 5.0 x16 (64 GB/s), faster than 4.0 (32 GB/s)."""
    job = job_of(built_in("0.5B"), prompts=8)
    actor = job.role("actor")
    more = update_seconds(job, replace(actor, optimizer_offload=True), ROUND) - update_seconds(job, actor, ROUND)
    size = 2 * 3 * 4 * 494032768
    assert size / 64e9 < more < size / 32e9


def test_the_backward_pass_of_attention_is_slower_than_its_flops():
    """Five matmuls for two, at 70 to 90 % of the rate (FlashAttention-2, arXiv 2307.08691, figures 4 and 5)."""
    job = job_of(prompt_tokens=100, response_tokens=50)
    found = forward_pass(job.role("actor"), Tokens(100, 50), job, ROUND, 1)
    alone = replace(found, matmul=0.0, elementwise=0.0)
    assert 2.5 / 0.9 < alone.backward_seconds(ROUND, False) / alone.seconds(ROUND) < 2.5 / 0.7


def test_float32_has_no_tensor_cores():
    """67 TFLOP/s are published for an H200."""
    actor = job_of().role("actor")
    assert 0.7 * 67e12 < matmul_rate(replace(actor, compute_bytes=4), H200) < 67e12
    assert matmul_rate(actor, H200) < 989e12


def test_adapters_slow_a_pass_down_as_in_the_record():
    """GPU: 1.64. CPU: benchmarks/results/planner_cpu.json, where predictions are within 25 %."""
    job = job_of(built_in("0.5B"), prompts=8)
    plain, adapted = (infer_seconds(job, replace(job.role("actor"), lora_rank=r), MATMULS) for r in (0, 1))
    assert adapted / plain == pytest.approx(1.64, rel=0.05)


def _recorded_generations() -> list[dict]:
    lines = (ROOT / "benchmarks/results/rollout_h200.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [line for line in found if line.get("lengths") == "even" and line["engine"] in ("native", "vllm")]


@pytest.mark.parametrize(
    "line", _recorded_generations(), ids=lambda line: f"{line['engine']} {line['shape']} {line['rows']}"
)
def test_generation_takes_the_recorded_time(line):
    """Of vLLM, its host decides with 1024 rows: 25 ms per step; of 7B, the bytes of the weights."""
    sizes = {"prompts": line["rows"], "prompt_tokens": line["prompt"], "response_tokens": line["new"]}
    job = job_of(built_in(line["shape"]), engine=line["engine"], memory_share=0.9, sleeps=False, **sizes)
    assert generation_seconds(job, job.role("actor"), H200) == pytest.approx(line["seconds"], rel=0.25)


def test_a_step_of_an_engine_hides_its_host_unless_ranks_take_the_same_steps():
    """25 ms of the host for 1024 rows (rollout_h200.jsonl), so 12.5 for 512: the GPU is faster."""
    job = job_of(built_in("0.5B"), prompts=512, response_tokens=100, engine="vllm", sleeps=False, memory_share=0.8)
    actor = job.role("actor")
    one, native = generation_seconds(job, actor, H200), generation_seconds(replace(job, engine="native"), actor, H200)
    host = 100 * 0.0125
    assert native < 0.9 * host < one < 1.1 * host
    two = replace(actor, layout=Layout(2))
    parallel = replace(job, rollout_tensor=2)
    with_host = generation_seconds(parallel, two, H200)
    alone = generation_seconds(replace(parallel, engine="native"), two, H200)
    assert with_host - alone == pytest.approx(host, rel=0.05)


def test_an_engine_that_slept_maps_its_cache():
    """In the records (vllm_h200.json, 0.4 of the memory) generation takes 0.2 to 0.3 s longer than its steps."""
    job = job_of(built_in("0.5B"), engine="vllm", memory_share=0.4)
    actor = job.role("actor")

    def wake(share: float) -> float:
        asleep = replace(job, memory_share=share)
        return generation_seconds(asleep, actor, H200) - generation_seconds(replace(asleep, sleeps=False), actor, H200)

    assert 0.2 < wake(0.4) < 0.3
    # without the weights, 0.92 GiB, the rest of the share is cache: as many seconds per GiB
    assert wake(0.8) / wake(0.4) == pytest.approx(
        (0.8 * H200.memory / GIB - 0.92) / (0.4 * H200.memory / GIB - 0.92), rel=1e-3
    )
    alone = replace(actor, name="rollout")  # one on separate devices never sleeps
    assert generation_seconds(job, alone, H200) == generation_seconds(replace(job, sleeps=False), alone, H200)


def test_cuda_graphs_make_a_decoding_step_faster():
    """Of 24 layers, by the time between the launches of their kernels."""
    job = job_of(built_in("0.5B"), response_tokens=100)

    def steps(eager: bool, device) -> float:
        return generation_seconds(replace(job, eager=eager), job.role("actor"), device)

    launches = replace(ROUND, layer_seconds=3e-3, decode_seconds=1e-3)
    assert steps(True, launches) - steps(False, launches) == pytest.approx(100 * 24 * 2e-3)


def test_a_short_update_takes_the_time_of_its_launches():
    """Of 24 layers, forward and backward, three times as long as without gradients; and what every update has."""
    job = job_of(built_in("0.5B"), prompts=1)
    actor = replace(job.role("actor"), checkpointing=False, updates=2)
    host = replace(MATMULS, layer_seconds=0.1, update_seconds=7.0)
    assert update_seconds(job, actor, host) == pytest.approx(2 * (24 * 0.1 * 3 * 2 + 7))
    assert infer_seconds(job, actor, host) == pytest.approx(24 * 0.1)


def test_experts_whose_layers_are_not_fused_take_the_recorded_time(monkeypatch):
    """engines_h200.json has updates of a mixture of experts with the layers of transformers, on three hosts."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import planner_records

    read = planner_records._read
    monkeypatch.setattr(planner_records, "_read", lambda name: {"lines": read(name)["layers_of_transformers"]["lines"]})
    found = list(planner_records._engines())
    assert len(found) == 6
    for run in found:
        plain, fused = (run.job.with_roles(["actor"], fuses_layers=fuses) for fuses in (False, True))
        ratio = _update(plain, run.devices) / run.seconds["update_actor"]
        assert 0.8 < ratio < 1.1 and _update(fused, run.devices) < 0.75 * run.seconds["update_actor"]
        # model types whose layers are not fused compute experts the same way
        shape = replace(run.job.role("actor").shape, model_type="qwen2_moe")
        assert _update(run.job.with_roles(["actor"], shape=shape), run.devices) == _update(plain, run.devices)


def _update(job, devices: int) -> float:
    return plan_groups(job, H200, [(job.names, devices)]).groups[0].seconds["update_actor"][1]


def test_which_settings_fuse_experts():
    """As `engines.loading.choose_kernels`: Liger is for GPUs."""
    shape = replace(TINY, experts=4, active_experts=2, expert_mlp=12, model_type="mixtral")
    config = "actor_rollout_ref.actor.fsdp_config."

    def fuses(*overrides: str, on_gpu: bool = True, kind: str = "mixtral") -> bool:
        loaded = load_config(overrides=["algorithm.adv_estimator=grpo", *overrides])
        job = settings_job(loaded, {"actor": replace(shape, model_type=kind)}, ["actor"], on_gpu)
        return job.roles[0].fuses_experts

    assert fuses() and fuses(kind="qwen3_moe") and not fuses(kind="qwen2_moe") and not fuses(kind="olmoe")
    assert fuses(f"{config}expert_parallel_size=2", "trainer.n_gpus_per_node=2")
    liger = "actor_rollout_ref.model.use_liger=true"
    assert not fuses(liger) and fuses(liger, on_gpu=False)


@pytest.mark.slow
def test_predictions_agree_with_the_records_as_the_page_says(monkeypatch):
    """All constants at once: docs/internals/scaling.md says how many of the recorded figures are within 25 and 10 %."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from planner_records import recorded_lines

    lines = recorded_lines(H200)
    near = [line for line in lines if abs(line["time_ratio"] - 1) <= 0.25]
    sizes = [line for line in lines if "memory_ratio" in line]
    fits = [line for line in sizes if abs(line["memory_ratio"] - 1) <= 0.1 + 1e-9]  # ratios are rounded: 1.1 is within
    found = [len(near), len(lines), *(sum(line["held_out"] for line in some) for some in (near, lines))]
    found += [len(fits), len(sizes), *(sum(line["held_out"] for line in some) for some in (fits, sizes))]
    page = (ROOT / "docs/internals/scaling.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith("| H200, one and two GPUs |"))
    images = [line["time_ratio"] for line in lines if "gpu-vl, FSDP2, native" in line["name"]]
    assert len(images) == 4 and all(abs(ratio - 1) < 0.13 for ratio in images)
    assert found == [int(number) for number in re.findall(r"(\d+) of (\d+)", row) for number in number]
