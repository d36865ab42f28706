"""Parameters that are gathered in buckets."""

import pytest
import torch

from tests.engines.ranks import OPTIMIZER, make_engine, qwen2, run_on_ranks, save_model
from verl.engines.gathering import gather_tensors
from verl.engines.parallel import full_tensor

pytest.importorskip("peft")

LORA = {"lora_rank": 3, "lora_alpha": 6}


def gathered_on_rank(path: str) -> dict:
    """What `gather_tensors` returns for several sizes of a bucket, compared with gathering one by one."""
    results = {}
    for keys in ({}, LORA):
        engine = make_engine(path, OPTIMIZER, sharded=True, **keys)
        named = list(engine.module.named_parameters())
        for bucket_bytes in (1, 3000, 1 << 30):
            for dtype in (None, torch.bfloat16):
                found = list(gather_tensors(iter(named), dtype, bucket_bytes))
                assert [name for name, _ in found] == [name for name, _ in named]
                for (name, full), (_, parameter) in zip(found, named):
                    expected = full_tensor(parameter.detach())
                    assert torch.equal(full, expected if dtype is None else expected.to(dtype)), name
                results[str((bool(keys), bucket_bytes, dtype))] = len(found)
    return results


@pytest.mark.slow
def test_parameters_gathered_in_buckets_are_those_gathered_one_by_one(tmp_path):
    path = save_model(qwen2(), tmp_path / "model")
    one, other = run_on_ranks(2, gathered_on_rank, path)
    assert one == other and len(one) == 12
