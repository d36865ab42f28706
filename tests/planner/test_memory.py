"""Memory of an update by hand, and the logits of Megatron's shards as autograd holds them."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.planner.test_planner import H200, TINY, job_of
from verl.modeling.log_probs import ShardedStatistics
from verl.planner.memory import logits, update_items
from verl.planner.workload import Layout


def megatron_job(size: int):
    """64 sequences of 128 + 128 tokens on two tensor-parallel ranks, which have 1000 logits of a token each."""
    job = job_of(replace(TINY, vocabulary=2000), model_parallel=True)
    return job, replace(job.role("actor"), compute_bytes=size, weight_bytes=size, layout=Layout(2, tensor=2))


@pytest.mark.parametrize("size", [2, 4])
def test_logits_of_megatron_by_hand(size):
    """Those of the rank, and in a backward pass their gradient."""
    job, role = megatron_job(size)
    assert logits(job, role, 1024, H200, training=True) == 512 * 1000 * 2 * size
    assert logits(job, role, 1024, H200, training=False) == 512 * 1000 * size
    alone = replace(role, layout=Layout(1))
    assert logits(job, alone, 1024, H200, training=False) == 512 * 2000 * size


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.fast("dtype1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_megatron_as_allocated(group, dtype):
    job, role = megatron_job(dtype.itemsize)
    states = 32768  # blocks in which a CPU computes are small beside them
    targets = torch.zeros(states, dtype=torch.long)
    values = torch.randn(states, 1000, dtype=dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        given = values.clone().requires_grad_()
        found = ShardedStatistics.apply(given, targets, 0.7, (True, False, False), 0, group)
        found[0].sum().backward()
    peak = now = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert peak == pytest.approx(logits(job, role, 2 * states, H200, training=True), rel=0.03)


def test_the_gradients_of_a_single_micro_batch_come_when_its_activations_are_freed():
    job = job_of(prompts=2)
    single, several = (job.with_roles(["actor"], update_tokens=tokens, checkpointing=False) for tokens in (4096, 256))
    begin = update_items(single, single.role("actor"), H200, 0.0)
    # of the beginning: only the output layer's, 32 x 8 in float32
    assert begin["gradients"] == 4 * 32 * 8
    assert update_items(several, several.role("actor"), H200, 0.0)["gradients"] == 4 * 1704
    # the end, with all gradients and the activations of one layer, is larger if the model is large for its tokens
    short = job_of(prompts=1, prompt_tokens=1, response_tokens=1)
    short = short.with_roles(["actor"], update_tokens=4096, checkpointing=False)
    end = update_items(short, short.role("actor"), H200, 0.0)
    assert end["gradients"] == 4 * 1704 and end["activations"] == end["logits, working memory"]
