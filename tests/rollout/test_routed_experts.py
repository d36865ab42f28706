"""The experts that rollout engines report are those that the model chooses for the same tokens."""

import asyncio

import numpy as np
import pytest
import torch

from tests.rollout.mixtures import check_experts
from tests.rollout.test_native_families import PROMPTS, model
from verl.agents import Prompt, Trajectory
from verl.config import schema
from verl.rollout.base import ROLLOUT_ENGINES, RolloutEngine, RolloutEnv, make_rollout_engine
from verl.rollout.native.decoder import Projection
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.experts import Experts
from verl.rollout.native.model import read_decoder
from verl.rollout.native.speculation import PromptLookup
from verl.rollout.request import Completion, Request, SamplingParams, make_requests
from verl.rollout.routed_experts import extended, layers_with_experts, routed_experts_column
from verl.utils.coroutines import gather_coroutines, run_coroutine
from verl.workers.rollout.service import extend

LIMITS = [12, 3, 9, 12, 5]
SAMPLED = SamplingParams(12, (3, 50), seed=5)
CASES = pytest.mark.parametrize("case", ["qwen3-moe", "mixtral"])


@CASES
def test_the_engine_reports_the_choices_of_the_model(case):
    module = model(case)
    requests = make_requests(PROMPTS, SAMPLED, limits=LIMITS)
    longest = max(len(prompt) + limit - 1 for prompt, limit in zip(PROMPTS, LIMITS))
    room = 2 * longest * read_decoder(module).cache_bytes_per_token()  # two rows at a time
    for options in ({}, {"cache_bytes": room}, {"lookup": PromptLookup(4, 3, 1)}):
        engine = NativeRollout(module, records=True, **options)
        check_experts(module, requests, engine.generate(requests))
    assert all(c.routed_experts is None for c in NativeRollout(module).generate(requests))


def test_requests_that_arrive_over_time():
    module = model("mixtral")
    engine = NativeRollout(module, records=True)
    requests = make_requests(PROMPTS, SAMPLED, limits=LIMITS)

    async def later(i: int) -> Completion:
        await asyncio.sleep(0.003 * i)
        return await engine.generate_one(requests[i])

    check_experts(module, requests, run_coroutine(gather_coroutines([later(i) for i in range(5)])))


@pytest.mark.parametrize(("first", "held"), [(0, 6), (2, 3)], ids=["all experts", "those of one rank"])
def test_every_way_to_compute_the_experts_is_the_weighted_sum(first, held):
    """One matmul per expert, dense matmuls, and the grouped matmul of a GPU, which torch also has on a CPU."""
    generator = torch.Generator().manual_seed(0)
    shapes = (9, 32), (32, 6), (held, 48, 32), (held, 32, 24)
    x, router, gate_up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    experts = Experts(Projection(router), gate_up, down, first, top_k=2, normalized=True, keeps_float=True)
    chosen, weights = experts.route(x)
    expected = torch.zeros(9, 32, dtype=torch.float64)
    for token in range(9):
        for expert, weight in zip(chosen[token].tolist(), weights[token].double()):
            if first <= expert < first + held:
                gate, up = (gate_up[expert - first].double() @ x[token].double()).chunk(2)
                expected[token] += weight * (down[expert - first].double() @ (torch.relu(gate) * up))
    own = (chosen - first).where((chosen >= first) & (chosen < first + held), held)
    found = [
        experts.outputs(x, chosen, weights, torch.relu),
        experts.outputs(x, chosen, weights, torch.relu, static=True),
        experts._grouped(x, own, weights, torch.relu),
    ]
    for way in found:
        assert (way.double() - expected).norm() < 0.01 * expected.norm()


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU. torch's grouped matmul on a CPU has the same limits."""

    is_cuda = property(lambda self: True)


@pytest.mark.parametrize("width", [24, 20, 7])
@pytest.mark.parametrize("static", [False, True])
def test_widths_that_grouped_matmuls_do_not_support(width, static):
    """Rows of 40 and 14 bytes."""
    generator = torch.Generator().manual_seed(0)
    shapes = (9, 32), (32, 6), (6, 2 * width, 32), (6, 32, width)
    x, router, gate_up, down = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    experts = Experts(Projection(router), gate_up, down, 0, top_k=2, normalized=True, keeps_float=True)
    chosen, weights = experts.route(x)
    expected = experts.outputs(x, chosen, weights, torch.relu, static)
    found = experts.outputs(x.as_subclass(OnGpu), chosen, weights, torch.relu, static)
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_dense_model_has_nothing_to_record():
    module = model("qwen3")
    with pytest.raises(ValueError, match="enable_rollout_routing_replay=true: Qwen3ForCausalLM is not a mixture"):
        NativeRollout(module, records=True)


def test_an_engine_that_does_not_report_them_is_refused():
    class Silent(RolloutEngine):
        def generate(self, requests):
            return []

    ROLLOUT_ENGINES.register("silent")(lambda config, model, env, train_engine=None: Silent())
    section = schema.RolloutConfig(enable_rollout_routing_replay=True)
    env = RolloutEnv(0, 1, 0, torch.device("cpu"), 0)
    with pytest.raises(ValueError, match="the rollout engine 'silent' does not report the experts"):
        make_rollout_engine("silent", section, schema.ModelConfig(), env)


def test_layers_with_experts_are_found_by_the_names_of_their_parameters():
    names = [f"model.layers.{layer}.mlp.experts.{i}.up_proj.weight" for layer in (12, 3, 0) for i in range(2)]
    dense = ["model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.shared_expert.up_proj.weight", "lm_head.weight"]
    assert layers_with_experts("vllm", [*names, *dense]) == [0, 3, 12]
    with pytest.raises(ValueError, match=r"rollout\.name=vllm: the model is not a mixture of experts: use false"):
        layers_with_experts("vllm", dense)


# ---- from completions to the column ---------------------------------------------------------------------------------


def experts_of(*tokens: int) -> np.ndarray:
    """One layer and one expert per token."""
    return np.array(tokens, dtype=np.int16).reshape(-1, 1, 1)


def test_the_first_choice_of_a_token_is_kept():
    # the second request computes the tokens of the first again, with other choices
    trajectory = Trajectory(Prompt([1, 2], SAMPLED, 0))
    trajectory.add_completion(Completion([3, 4], [0.0, 0.0], "stop", [], experts_of(0, 1, 2)))
    trajectory.add_tokens([5])
    trajectory.add_completion(Completion([6], [0.0], "stop", [], experts_of(7, 7, 7, 3, 4)))
    assert trajectory.routed_experts.flatten().tolist() == [0, 1, 2, 3, 4]
    whole = Completion([3], [0.0], "abort", [], experts_of(0, 1))
    extend(whole, Completion([4], [0.0], "stop", [], experts_of(7, 7, 2)), 0, Request([1, 2], SAMPLED, 0))
    assert whole.routed_experts.flatten().tolist() == [0, 1, 2]
    assert extended(None, None, 0) is None
    # the last choice is for a token that was cut off
    assert extended(experts_of(0, 1, 2, 3), experts_of(7, 7, 7, 4), length=3).flatten().tolist() == [0, 1, 2, 4]


def test_column_of_padded_samples():
    found = routed_experts_column([experts_of(4, 5, 6), experts_of(7)], [2, 1], prompt_width=3, response_width=2)
    assert found.shape == (2, 5, 1, 1) and found.dtype == torch.int16
    assert found.flatten(1).tolist() == [[-1, 4, 5, 6, -1], [-1, -1, 7, -1, -1]]
    with pytest.raises(ValueError, match=r"does not pass Completion\.routed_experts on"):
        routed_experts_column([experts_of(4), None], [1, 1], 1, 1)
