"""Many answers to text: as the tokenizer's own batch_decode, also where its class changes what it decodes."""

import pytest
from transformers import PreTrainedTokenizerFast

from examples.quickstart.tiny_model import tiny_model
from verl.utils.tokenizer import decode_all

ROWS = [[], [5], list(range(60)), [3, 0, 4, 1, 2, 2]]


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args, **kwargs) -> str:
        return super()._decode(*args, **kwargs).upper()


@pytest.mark.parametrize("like", ["llama", "qwen2"])
@pytest.mark.parametrize("skip", [True, False])
def test_equals_row_by_row(like, skip, tmp_path):
    from transformers import AutoTokenizer

    tiny_model(like, tmp_path / "m", 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    expected = [tokenizer.decode(row, skip_special_tokens=skip) for row in ROWS]
    assert decode_all(tokenizer, ROWS, skip_special_tokens=skip) == expected

    own = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    assert decode_all(own, ROWS[2:3], skip_special_tokens=skip) == [own.decode(ROWS[2], skip_special_tokens=skip)]
    assert decode_all(own, ROWS[2:3])[0].isupper()
