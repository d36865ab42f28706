"""A checkpoint that megatron-core itself writes, of its own GPT model, is merged."""

import pytest
import torch

from tests.engines.megatron_cpu import skip_reason

if reason := skip_reason():
    pytest.skip(reason, allow_module_level=True)

from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from tests.engines.megatron_cpu.ranks import MODELS, megatron_engine
from tests.engines.ranks import save_model
from verl.engines.megatron.layout import ShardRank, conversions
from verl.engines.megatron.weight_files import WeightFiles
from verl.model_merger.__main__ import main


def own_name(name: str) -> list[str]:
    """The parameters of megatron-core's model that make up one of ours."""
    if name.endswith("mlp.experts.gate_up_proj"):
        return [f"{name.removesuffix('gate_up_proj')}local_experts.{e}.linear_fc1.weight" for e in range(4)]
    if name.endswith("mlp.experts.down_proj"):
        return [f"{name.removesuffix('down_proj')}local_experts.{e}.linear_fc2.weight" for e in range(4)]
    return [name]


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
@pytest.mark.parametrize("singleton", [False, True])
def test_a_checkpoint_of_megatron_core_is_merged(name, singleton, tmp_path):
    engine = megatron_engine(save_model(MODELS[name], tmp_path / "model"))  # for the configuration of megatron-core
    hf = engine.hf
    spec = get_gpt_layer_local_spec(num_experts=engine.config.num_moe_experts, normalization="RMSNorm")
    engine.config.moe_layer_freq = 1  # as public verl: the layers are the same
    settings = {"share_embeddings_and_output_weights": hf.tie_word_embeddings, "position_embedding_type": "none"}
    model = GPTModel(engine.config, spec, 40, 64, **settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    folder = tmp_path / "actor"
    (folder / "dist_ckpt").mkdir(parents=True)
    hf.save_pretrained(folder / "huggingface")
    metadata = {"singleton_local_shards": True} if singleton else None
    dist_checkpointing.save(model.sharded_state_dict(metadata=metadata), str(folder / "dist_ckpt"))
    words = ["merge", "--backend", "megatron", "--local_dir", str(folder), "--allow_unchanged"]
    assert main([*words, "--target_dir", str(tmp_path / "merged")]) == 0
    files, parameters = WeightFiles(str(tmp_path / "merged")), dict(model.named_parameters())
    for conversion in conversions(hf, "causal_lm"):
        found = conversion.join([files.read(region) for region in conversion.regions(ShardRank())], ShardRank())
        stored = [parameters.pop(each) for each in own_name(conversion.name)]
        expected = torch.stack(stored) if conversion.is_expert else stored[0]
        assert torch.equal(found, expected[: len(found)]), conversion.name
    assert not parameters
