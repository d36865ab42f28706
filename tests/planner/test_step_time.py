"""Seconds of a step by hand: images, engines in the trainer's processes, all-reduces."""

from dataclasses import replace

import pytest

from tests.planner.test_planner import H200, TINY, job_of
from verl.planner.devices import GIB
from verl.planner.placement import role_seconds
from verl.planner.shapes import VisionShape, built_in
from verl.planner.step_time import (
    all_reduce_seconds,
    collective_seconds,
    forward_pass,
    generation_seconds,
    image_seconds,
    push_seconds,
)
from verl.planner.workload import Layout, Tokens

#: 900 parameters of the tower in 3 layers of hidden size 16 and MLP 32; 4 patches of a token, 12 values of a patch
SEEING = replace(TINY, vision=VisionShape(1000, 900, 3, 16, 32, 4, 12))


def test_an_all_reduce_sends_twice_as_much_as_a_gather_in_one_kernel():
    # each of 4 devices receives 3/4 of the bytes twice; two rounds
    assert all_reduce_seconds(4e9, 4, H200) == pytest.approx(2 * 3e9 / 240e9 + 2 * 20e-6)
    assert collective_seconds(4e9, 4, H200) == pytest.approx(3e9 / 240e9 + 2 * 20e-6)
    assert all_reduce_seconds(4e9, 1, H200) == 0


def test_a_forward_pass_with_images_by_hand():
    tokens, job = Tokens(100, 50, 2), job_of(SEEING, prompt_tokens=50)
    text = forward_pass(job_of(TINY).role("actor"), tokens, replace(job, roles=job_of(TINY).roles), H200, 1)
    found = forward_pass(job.role("actor"), tokens, job, H200, 1)
    # 100 prompt tokens are 400 patches, each multiplied with 900 parameters
    assert found.matmul - text.matmul == pytest.approx(2 * 400 * 900 / 660e12)
    # 200 patches of an image attend to each other: 4 FLOPs per element of the hidden size, key and layer
    rate = H200.attention_rate(200, 64)
    assert found.attention - text.attention == pytest.approx(4 * 16 * 3 * 400 * 200 / rate)
    assert found.elementwise - text.elementwise == pytest.approx(400 * 3 * (240 * 16 + 10 * 32) / 4.2e12)
    # 12 float32 values of each patch are copied, and two samples placed, before the first kernel
    assert found.images == pytest.approx(400 * 12 * 4 / 1.6e9 + 2 * 0.25e-3) and text.images == 0
    assert found.seconds(H200) == pytest.approx(replace(found, images=0).seconds(H200) + found.images)


def test_the_images_of_a_step_are_processed_one_after_the_other():
    job = job_of(SEEING, prompts=3, samples=8, prompt_tokens=50)
    seconds = 3 * 50 * 4 * 12 * 4 / 225e6  # of each prompt once, not of each sample
    assert image_seconds(job, job.role("actor")) == pytest.approx(seconds)
    found = role_seconds(job, H200, job.roles, job.roles[0])
    assert found["prompts"] == ("generation", pytest.approx(seconds))
    text = job_of(TINY)
    assert "prompts" not in role_seconds(text, H200, text.roles, text.roles[0])


def test_a_step_of_an_engine_hides_its_host_unless_ranks_take_the_same_steps():
    """Of 100 tokens of 512 sequences: 512 x 24 us of the host per step."""
    job = job_of(built_in("0.5B"), prompts=512, response_tokens=100, engine="vllm", sleeps=False, memory_share=0.8)
    actor = job.role("actor")
    one, native = generation_seconds(job, actor, H200), generation_seconds(replace(job, engine="native"), actor, H200)
    assert native < 100 * 512 * 24e-6 < one  # the GPU is faster than the host, which decides
    two = replace(actor, layout=Layout(2))
    parallel = replace(job, rollout_tensor=2)
    with_host = generation_seconds(parallel, two, H200)
    alone = generation_seconds(replace(parallel, engine="native"), two, H200)
    assert with_host - alone == pytest.approx(100 * 512 * 24e-6)


def test_an_engine_that_slept_maps_its_cache():
    job = job_of(built_in("0.5B"), engine="vllm", memory_share=0.5)
    actor = job.role("actor")
    awake = generation_seconds(replace(job, sleeps=False), actor, H200)
    weights = 494032768 * 2
    cache = 0.5 * H200.memory - weights
    assert generation_seconds(job, actor, H200) - awake == pytest.approx(cache / (200 * GIB))
    # one on separate devices never sleeps
    alone = replace(actor, name="rollout")
    assert generation_seconds(job, alone, H200) == generation_seconds(replace(job, sleeps=False), alone, H200)


def test_cuda_graphs_make_a_decoding_step_faster():
    job = job_of(built_in("0.5B"), response_tokens=100)
    graphs, eager = (generation_seconds(replace(job, eager=eager), job.role("actor"), H200) for eager in (False, True))
    assert eager - graphs == pytest.approx(100 * 24 * (120e-6 - 42e-6))


def test_a_push_into_vllm_loads_and_sums_every_parameter():
    shape = built_in("0.5B")
    job = job_of(shape, engine="native")
    two = replace(job.role("actor"), layout=Layout(2))
    # 24 layers of 7 matrices, 3 biases and 2 norms, the embedding, the last norm and the head
    assert shape.tensors == 24 * 12 + 3
    more = push_seconds(replace(job, engine="vllm"), two, H200, two) - push_seconds(job, two, H200, two)
    assert more == pytest.approx((24 * 12 + 3) * 0.25e-3 + 494032768 * 8 / 4.2e12)
