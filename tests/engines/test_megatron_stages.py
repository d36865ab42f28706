"""Layers and routers of the pipeline stages, as far as they are known without megatron-core."""

from types import SimpleNamespace

import pytest
import torch

from verl.config import load_config
from verl.engines.megatron.checks import check_sizes, end_stages
from verl.engines.megatron.routing import ChunkRouting
from verl.modeling.moe import NOT_RECORDED

MEGATRON = "actor_rollout_ref.actor.megatron."


def section(p, *keys):
    overrides = [f"{MEGATRON}pipeline_model_parallel_size={p}", f"trainer.n_gpus_per_node={p}"]
    names = {"embedding", "loss"} & set(keys)
    overrides += [f"{MEGATRON}override_transformer_config.account_for_{name}_in_pipeline_split=true" for name in names]
    overrides += [MEGATRON + key for key in keys if key not in names]
    batch = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    return load_config(overrides=[*overrides, *batch, "model_engine=megatron"]).actor_rollout_ref.actor.megatron


def layers_of_stages(layers, megatron):
    """What the stages between the ends get: equal shares of the rest."""
    first, last = end_stages(layers, megatron)
    given = [n for n in (first, last) if n is not None]
    others = megatron.pipeline_model_parallel_size - len(given)
    share, rest = divmod(layers - sum(given), others) if others else (0, layers - sum(given))
    assert rest == 0
    return [share if first is None else first, *[share] * (megatron.pipeline_model_parallel_size - 2)] + [
        share if last is None else last
    ]


@pytest.mark.parametrize(
    ("layers", "keys", "stages"),
    [
        (94, ("embedding", "loss"), [11, 12, 12, 12, 12, 12, 12, 11]),
        (61, ("embedding",), [30, 31]),
        (47, ("loss",), [12, 12, 12, 11]),
        (8, ("embedding", "loss"), [4, 4]),
        (6, (), [2, 2, 2]),
    ],
)
def test_the_embedding_and_the_loss_count_as_layers(layers, keys, stages):
    megatron = section(len(stages), *keys)
    assert layers_of_stages(layers, megatron) == stages
    hf = SimpleNamespace(num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4, intermediate_size=8)
    hf.model_type, hf.vocab_size, hf.hidden_size = "qwen2", 16, 8
    check_sizes(hf, megatron)


def test_one_stage_has_all_layers():
    assert end_stages(7, section(1, "embedding", "loss")) == (None, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("embedding", "loss"), "8 layers with embedding and loss as layers are 10, expected a multiple of the 4"),
        (("loss", "virtual_pipeline_model_parallel_size=2"), "no virtual_pipeline_model_parallel_size"),
        (("loss", "override_transformer_config.num_layers_in_first_pipeline_stage=2"), "remove it, or these"),
    ],
)
def test_layers_that_do_not_divide(keys, message):
    with pytest.raises(ValueError, match=message):
        end_stages(8, section(4, *keys))


@pytest.mark.parametrize(
    ("layers", "stages", "keys", "name"), [(2, 4, ("embedding", "loss"), "loss"), (1, 2, ("embedding",), "embedding")]
)
def test_a_stage_without_layers_is_refused(layers, stages, keys, name):
    with pytest.raises(
        ValueError, match=f"of {layers} layers, the stage of the {name} would have none: use fewer than"
    ):
        end_stages(layers, section(stages, *keys))


def test_a_chunk_compares_the_recorded_choices_of_its_layers():
    """Two experts, one for each token. The second token has no recorded choice, the third another one."""
    stage = SimpleNamespace(records=False, counts=True, experts=2)
    stage.share_of = stage.tokens_of = lambda values: getattr(values, "input_ids", values)
    layer = SimpleNamespace(index=0, waiting=[], start=lambda recorded: None)
    chunk = ChunkRouting(stage, [layer])
    layer.used = layer.computed = torch.tensor([[0], [1], [1]])
    layer.entropies = torch.tensor([0.5, 0.25, 0.0])
    recorded = torch.tensor([0, NOT_RECORDED, 0]).view(3, 1, 1)
    chunk.finish(SimpleNamespace(input_ids=torch.arange(3), routed_experts=recorded))
    assert chunk.differs[0].tolist() == [False, False, True] and chunk.compared[0].tolist() == [True, False, True]
    assert layer.load.tolist() == [1, 2] and layer.entropy == 0.75
