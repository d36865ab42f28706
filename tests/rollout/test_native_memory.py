"""What the native engine keeps in memory while it sleeps."""

import asyncio
import gc
import weakref

import torch

from tests.rollout.test_continuous import make_engine, mixed_requests
from verl.rollout.native import engine as native_engine
from verl.rollout.native.decoder import Decoder
from verl.rollout.native.model import read_decoder


def test_sleep_frees_the_copy_of_the_weights(monkeypatch):
    engine = make_engine("native", dtype=torch.bfloat16)  # another dtype than that of the parameters: a copy
    copies = []

    def read(*given, **options) -> Decoder:
        copies.append(read_decoder(*given, **options))
        return copies[-1]

    monkeypatch.setattr(native_engine, "read_decoder", read)

    async def generate() -> None:
        await asyncio.gather(*map(engine.generate_one, mixed_requests(0, 3)))

    asyncio.run(generate())
    found = [weakref.ref(copy) for copy in copies]
    copies.clear()
    assert found
    engine.sleep()
    gc.collect()
    assert [ref() for ref in found] == [None] * len(found)
