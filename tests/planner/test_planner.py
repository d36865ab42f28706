"""The planner: hand-computed memory, monotonicity, search against brute force, fixes that fit."""

import itertools
from dataclasses import replace

import pytest

from verl.planner import devices, shapes
from verl.planner.devices import GIB
from verl.planner.fixes import Change, describe, plan_with, smallest_change
from verl.planner.memory import activation_bytes, gradients, kv_cache_bytes, optimizer_bytes, weights
from verl.planner.placement import STAGES, is_possible, plan_groups
from verl.planner.report import choice_lines, memory_lines
from verl.planner.search import MEGATRON_SIZES, Search, Space, brute_force, partitions, sizes_up_to
from verl.planner.shapes import ModelShape
from verl.planner.workload import Job, Layout, Role

H200, A100 = devices.built_in("H200"), devices.built_in("A100")
#: hidden 8, MLP 16, 2 layers, 4 heads of 2, 2 key heads, vocabulary 32
TINY = ModelShape("tiny", 2, 8, 16, 4, 2, 2, 32)


def job_of(shape=TINY, roles=("actor",), **settings) -> Job:
    made = []
    for name in roles:
        trains, value = name in ("actor", "critic"), name in ("critic", "reward")
        made.append(Role(name, shape, trains=trains, value_head=value))
    common = {"prompts": 64, "samples": 1, "prompt_tokens": 128, "response_tokens": 128}
    return Job(tuple(made), **(common | settings))


# ---- shapes and memory, by hand -------------------------------------------------------------------------------------


def test_parameters_by_hand():
    # q 8x8, k and v 8x4, o 8x8, gate, up and down 8x16, two norms of 8
    layer = 64 + 32 + 32 + 64 + 3 * 128 + 16
    assert TINY.layer_parameters == layer == 592
    assert TINY.parameters() == 2 * layer + 32 * 8 + 8 + 32 * 8 == 1704
    assert TINY.parameters(value_head=True) == 1704 - 256 + 8
    assert replace(TINY, tied=True).parameters() == 1704 - 256
    # sums of the sides of the matrices: q, k, v, o, gate, up, down
    assert TINY.lora_parameters(4) == 2 * 4 * (16 + 12 + 12 + 16 + 24 + 24 + 24)


@pytest.mark.parametrize(
    ("name", "count"), [("0.5B", 494032768), ("7B", 7615616512), ("Llama-7B", 6738415616), ("70B", 68976648192)]
)
def test_built_in_shapes_have_the_published_number_of_parameters(name, count):
    assert shapes.built_in(name).parameters() == count


def test_training_memory_by_hand():
    job = job_of()
    one, four = (job.role("actor").on(devices) for devices in (1, 4))
    assert (weights(job, one), gradients(job, one), optimizer_bytes(job, one)) == (4 * 1704, 4 * 1704, 8 * 1704)
    assert (weights(job, four), gradients(job, four), optimizer_bytes(job, four)) == (1704, 1704, 2 * 1704)
    lora = replace(one, lora_rank=4)
    assert (weights(job, lora), gradients(job, lora)) == (4 * 1704, 4 * 1024)
    megatron = replace(job, kind="megatron")
    sharded = replace(one, layout=Layout(8, tensor=2, pipeline=2))
    # bf16 weights and float32 gradients over t p, master weights and moments over all ranks
    assert weights(megatron, sharded) == 2 * 1704 / 4
    assert (gradients(megatron, sharded), optimizer_bytes(megatron, sharded)) == (4 * 1704 / 4, 12 * 1704 / 8)


def test_kv_cache_by_hand():
    job = job_of(samples=4, prompt_tokens=10, response_tokens=6)
    # keys and values of 2 layers x 4 elements x 2 bytes; the prompt of a group is stored once
    assert TINY.kv_bytes(2) == 2 * 2 * 4 * 2 == 32
    assert kv_cache_bytes(job, job.role("actor"), 8) == (2 * 10 + 8 * 6) * 32
    assert kv_cache_bytes(replace(job, rollout_tensor=2), job.role("actor"), 8) == (2 * 10 + 8 * 6) * 16


def test_activations_by_hand():
    role = Role("actor", TINY, compute_bytes=2)
    # per layer: two sums in float32 and two norms in 16 bits with their scales, rotated q, k, v, the output of
    # attention with its statistics, gate, up and their product
    layer = 2 * (4 + 2) * 8 + 2 * 4 + 2 * (8 + 8) + 2 * 8 + 4 * 4 + 3 * 2 * 16
    found = activation_bytes(role)
    assert found.plain == 2 * layer
    assert found.checkpointed == 2 * 8 * (4 + 2) + layer


# ---- monotonicity ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "megatron"])
@pytest.mark.parametrize("roles", [("actor",), ("actor", "ref", "critic", "reward")])
def test_more_devices_never_need_more_memory_per_device(kind, roles):
    job = job_of(shapes.built_in("7B"), roles, prompts=1024, kind=kind, engine="vllm", memory_share=0.3)
    for role in roles:  # what is chosen automatically uses the memory that there is
        job = job.with_role(role, update_tokens=4096, checkpointing=True)
    for few, many in itertools.pairwise([2, 4, 8, 16, 32, 64]):
        small, large = (plan_groups(job, H200, [(roles, count)]) for count in (few, many))
        assert large.peak <= small.peak


@pytest.mark.parametrize(
    "changes", [{"checkpointing": True}, {"optimizer_offload": True}, {"update_tokens": 4096}, {"lora_rank": 16}]
)
def test_an_update_needs_less_memory_with(changes):
    phase = "weight push" if "optimizer_offload" in changes else "update of the actor"
    job = job_of(shapes.built_in("7B"), ("actor", "ref"), prompts=1024)
    job = job.with_role("actor", update_tokens=16384, checkpointing=False)

    def needed(job):
        return sum(plan_groups(job, H200, [(job.names, 4)]).groups[0].memory[phase].values())

    assert needed(job.with_role("actor", **changes)) < needed(job)


def test_more_devices_are_never_slower():
    job = job_of(shapes.built_in("7B"), ("actor", "ref", "critic"), prompts=512, strict=False, engine="vllm")
    search = Search(job, H200, Space(separate_rollout=False))
    seconds = [search.plans(count, 1)[0].seconds for count in (4, 8, 12, 16)]
    assert seconds == sorted(seconds, reverse=True)


# ---- search ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "bell"), [(1, 1), (2, 2), (3, 5), (4, 15), (5, 52)])
def test_partitions_are_counted_by_bell_numbers(count, bell):
    names = [str(i) for i in range(count)]
    found = list(partitions(names))
    assert len({frozenset(map(frozenset, p)) for p in found}) == len(found) == bell
    assert all(sorted(itertools.chain(*p)) == names for p in found)


def test_sizes_of_groups():
    assert sizes_up_to(6, 8) == [1, 2, 3, 4, 5, 6]
    assert sizes_up_to(32, 8) == [1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32]
    assert max(sizes_up_to(1024, 8)) == 1024 and len(sizes_up_to(1024, 8)) < 80


@pytest.mark.parametrize("devices_", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("roles", [("actor", "ref"), ("actor", "ref", "critic", "reward")])
def test_search_equals_brute_force(devices_, roles):
    job = job_of(shapes.built_in("0.5B"), roles, strict=False, prompts=48, samples=2, response_tokens=512)
    search = Search(job, H200, Space(separate_rollout=True, rollout_sizes=(1, 2)))
    best, expected = search.plans(devices_), brute_force(search, devices_)
    assert best[0].seconds == expected.seconds
    assert best == Search(job, H200, Space(separate_rollout=True, rollout_sizes=(1, 2))).plans(devices_)


def test_search_equals_brute_force_when_memory_is_short():
    job = job_of(shapes.built_in("7B"), ("actor", "ref", "critic"), strict=False, engine="vllm", memory_share=0.4)
    search = Search(job, H200, Space(separate_rollout=False, rollout_sizes=(1, 2)))
    assert not search.plans(1) and brute_force(search, 1) is None
    for count in (4, 8):
        assert search.plans(count)[0].seconds == brute_force(search, count).seconds


def test_a_strict_batch_is_divided_by_the_ranks():
    job = job_of(shapes.built_in("0.5B"), prompts=6)
    assert not is_possible(job, job.role("actor").on(4)) and is_possible(job, job.role("actor").on(3))
    best = Search(job, H200, Space(separate_rollout=False)).plans(8)[0]
    assert 6 % best.groups[0].devices == 0


def test_a_thousand_devices_take_seconds():
    job = job_of(shapes.built_in("70B"), ("actor", "ref", "critic", "reward"), prompts=4096, kind="megatron")
    job = replace(job, strict=False, engine="vllm", prompt_tokens=1024, response_tokens=1024)
    best, runner_up = Search(job, H200, Space(separate_rollout=False, model_sizes=MEGATRON_SIZES)).plans(1024)
    assert best.fits and best.seconds <= runner_up.seconds and best.devices <= 1024
    assert "runner-up" in "\n".join(choice_lines([best, runner_up]))


def test_stages_add_up_inside_a_group_and_groups_take_the_slowest():
    job = job_of(shapes.built_in("0.5B"), ("actor", "ref", "critic"))
    both = plan_groups(job, H200, [(job.names, 4)])
    split = plan_groups(job, H200, [(("actor",), 4), (("ref", "critic"), 4)])
    operators = {name: seconds for group in both.groups for name, seconds in group.seconds.items()}
    assert {stage for stage, _ in operators.values()} == set(STAGES)
    assert both.stages[1] == operators["ref"][1] + operators["values"][1]
    update = operators["update_actor"][1] + operators["sync_weights"][1]
    assert both.stages[2] == pytest.approx(update + operators["update_critic"][1])
    assert split.stages[2] == pytest.approx(max(update, split.groups[1].seconds["update_critic"][1]))
    assert replace(split, concurrent=False).seconds > split.seconds


# ---- what does not fit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["native", "vllm"])
@pytest.mark.parametrize("name", ["1.5B", "7B", "32B", "70B"])
@pytest.mark.parametrize(("roles", "count"), [(("actor",), 1), (("actor", "ref", "critic"), 2), (("actor", "ref"), 8)])
@pytest.mark.parametrize("tokens", [None, 65536])
def test_the_smallest_change_fits(engine, name, roles, count, tokens):
    job = job_of(shapes.built_in(name), roles, prompts=1024, engine=engine, response_tokens=2048, memory_share=0.6)
    for role in roles:
        job = job.with_role(role, update_tokens=tokens, infer_tokens=tokens)
    groups = [(roles, count)]
    if plan_groups(job, A100, groups).fits:
        return
    change, plan = smallest_change(job, A100, groups)
    assert plan.fits and plan == plan_with(change, job, A100, groups)
    assert change.settings or change.factor > 1
    assert describe(change, plan)


def test_the_change_is_the_cheapest_one():
    job = job_of(shapes.built_in("1.5B"), prompts=1024, memory_share=0.3).with_role("actor", update_tokens=65536)
    job = job.with_role("actor", checkpointing=False)
    groups = [(("actor",), 1)]
    change, _ = smallest_change(job, A100, groups)
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu="
    assert [s.partition(key)[2] for s in change.settings if s.startswith(key)] == ["16384"]
    assert not plan_groups(job, A100, groups).fits


def test_a_change_that_is_not_possible_is_no_plan():
    job = job_of(replace(TINY, kv_heads=1), prompts=3)
    assert plan_with(Change((), lambda job: job, 2), job, H200, [(("actor",), 1)]) is None


def test_the_table_says_what_does_not_fit():
    job = job_of(shapes.built_in("70B"), prompts=1024)
    lines = "\n".join(memory_lines(plan_groups(job, H200, [(("actor",), 1)])))
    assert "DOES NOT FIT into 140 GiB" in lines.replace("139.8", "140") and "update of the actor" in lines


def test_a_model_that_is_not_modelled():
    with pytest.raises(ValueError, match="mixture of experts"):
        ModelShape.of({"num_experts": 8}, "moe")
    with pytest.raises(ValueError, match="has no num_hidden_layers"):
        ModelShape.of({"n_embd": 8}, "gpt2")
    with pytest.raises(ValueError, match="no built-in model"):
        shapes.built_in("7")


def test_a_calibration_is_stored_for_one_device_and_its_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path))
    assert devices.calibrated({"torch": "1"}, "H200") == (None, "this host is not calibrated")
    devices.save(H200, {"torch": "1"})
    assert devices.calibrated({"torch": "1"}, "H200") == (H200, "")
    assert devices.calibrated({"torch": "2"}, "H200")[0] is None
    assert devices.calibrated({"torch": "1"}, "H100")[0] is None
    (tmp_path / "calibration.json").write_text("{}")
    with pytest.raises(ValueError, match="damaged"):
        devices.calibrated({"torch": "1"}, "H200")


def test_memory_of_a_device_is_in_bytes():
    assert 139 < H200.memory / GIB < 141 and H200.matmul > 2 * A100.matmul
