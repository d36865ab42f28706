"""Texts that end a response: at the token that completes one, whatever the batch."""

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.config import load_config
from verl.config.schema.offline import GenerationConfig
from verl.rollout.native.engine import NativeRollout
from verl.rollout.native.model import read_decoder
from verl.rollout.request import SamplingParams, StopStrings, make_requests, stop_strings

PIECES = ["a", "b", "ab", "ba", "abc", "", "é"]
PROMPTS = [[1, 2], [3], [4, 0, 1], [2], [6, 6]] * 4


def decode(token_ids: list[int]) -> str:
    return "".join(PIECES[i] for i in token_ids)


@pytest.fixture(scope="module")
def module():
    torch.manual_seed(0)
    shape = dict(vocab_size=len(PIECES), hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    return Qwen2ForCausalLM(Qwen2Config(**shape, num_attention_heads=2, num_key_value_heads=1)).eval()


def test_the_first_token_that_completes_a_string_is_the_last():
    stop = StopStrings(("bab", "é"), decode)
    assert stop.find([0, 1, 2]) == 3  # a b ab
    assert stop.find([3, 3, 0]) == 2  # ba ba
    assert stop.find([0, 0, 1]) is None and stop.find([]) is None
    assert stop.find([1, 0, 1, 6]) == 3, "the earlier of two"
    answer = [0] * 20 + [3, 3, 0]
    assert [stop.find(answer, start) for start in (0, 5, 20, 21)] == [22] * 4, "what was looked at is not lost"


@pytest.mark.parametrize("strings", [(), ("a", "")])
def test_empty_strings_are_refused(strings):
    with pytest.raises(ValueError, match="non-empty strings"):
        StopStrings(strings, decode)


@pytest.mark.parametrize("strings", [("bab",), ("é", "abcab"), ("aaaaaaaaaaaaaaaaaaaaaaaaa",)])
def test_responses_are_cut_there_whatever_the_cache_holds(module, strings):
    limits = [40 - i for i in range(len(PROMPTS))]
    without = SamplingParams(40, (5,), seed=7)
    params = SamplingParams(40, (5,), seed=7, stop=StopStrings(strings, decode))
    expected = []
    for answer, limit in zip(NativeRollout(module).generate(make_requests(PROMPTS, without)), limits):
        ids = answer.token_ids[:limit]
        ends = [t for t in range(1, len(ids) + 1) if any(s in decode(ids[:t]) for s in strings)]
        ids = ids[: ends[0]] if ends else ids
        expected.append((ids, "stop" if ends or ids[-1] == 5 else "length"))
    row = read_decoder(module).cache_bytes_per_token() * 43
    for slots in (1, 4, len(PROMPTS)):
        engine = NativeRollout(module, cache_bytes=slots * row)
        answers = engine.generate(make_requests(PROMPTS, params, limits=limits))
        assert [(a.token_ids, a.finish_reason) for a in answers] == expected
        assert all(len(a.log_probs) == len(a.token_ids) for a in answers)


def test_steps_end_with_the_token_that_completes_the_string(module):
    """Texts are searched after every 8 steps: what the ninth token completes is found by the first search."""
    (answer,) = NativeRollout(module).generate(make_requests([[1, 2]], SamplingParams(40, (), seed=7, ignore_eos=True)))
    text = StopStrings((decode(answer.token_ids[:9]),), decode)
    assert text.find(answer.token_ids) == 9
    engine = NativeRollout(module)
    (found,) = engine.generate(make_requests([[1, 2]], SamplingParams(40, (), seed=7, stop=text)))
    assert found.token_ids == answer.token_ids[:9]
    assert engine.stats.steps == 8  # the first token is that of the prefill


def test_the_setting_brings_the_tokenizer():
    class Tokenizer:
        decode = staticmethod(decode)

    rollout = load_config(overrides=["rollout.stop=[ba,é]"], schema=GenerationConfig).rollout
    assert stop_strings(rollout.stop, Tokenizer()).find([0, 3]) == 2
    assert stop_strings(load_config(overrides=[], schema=GenerationConfig).rollout.stop, Tokenizer()) is None
