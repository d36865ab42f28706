"""The two mechanisms of verification: checksums, and the comparison of what a receiver stores with what it has read."""

import pytest
import torch

from verl.weight_sync.base import StoredWeights, is_check_due
from verl.weight_sync.verify import Loading, combine, fold, sums_of


def checksum_of(content: torch.Tensor) -> int:
    return combine([sums_of(content)])


def test_any_other_bit_gives_another_checksum():
    """Also the highest bit of a word, whose changes of the sums of its row and its column could cancel out."""
    words = torch.arange(3 * 1024 + 5) * 0x123456789ABCDEF
    checksum = checksum_of(words.view(torch.uint8))
    found = {checksum}
    for at in (0, 1, 7, 1023, 1024, 3071, 3076):
        for bit in range(64):
            other = words.clone()
            other[at] ^= (1 << bit) - (2**64 if bit == 63 else 0)
            found.add(checksum_of(other.view(torch.uint8)))
    assert len(found) == 1 + 7 * 64


def test_a_folded_checksum_depends_on_every_one_and_on_the_order():
    """Also on the first of many: an even factor would shift it out of 64 bits."""
    many = [0] * 100
    folded = {fold([*many[:at], 1, *many[at:]]) for at in (0, 1, 50, 100)}
    assert len(folded | {fold(many), fold([*many, 0]), fold([])}) == 4 + 3


def test_checksums_depend_on_the_positions_of_words():
    content = torch.arange(64, dtype=torch.uint8).repeat(200)
    expected = checksum_of(content)
    swapped = content.view(-1, 8).flip(0).reshape(-1)
    assert checksum_of(swapped) != expected
    changed = content.clone()
    changed[:16] = changed[:16].view(2, 8).flip(0).reshape(-1)
    assert checksum_of(changed) != expected, "two words of one row"
    changed = content.clone()
    changed[8008:8016], changed[8192:8200] = content[8192:8200], content[8008:8016]
    assert checksum_of(changed) != expected, "two words of different rows"


@pytest.fixture
def tensors():
    """One longer than a row of 1,024 words, odd numbers of bytes, one without elements, one that is not contiguous."""
    torch.manual_seed(0)
    shapes = {"a": (3, 5), "large": (300, 70), "none": (0, 4), "b": (7,), "c": (64, 64)}
    return {name: torch.randn(*shape) for name, shape in shapes.items()} | {"view": torch.randn(9, 4).T}


class Stores(StoredWeights):
    """Stores what it receives in a dtype, after a change."""

    def __init__(self, change=lambda tensors: None, dtype=torch.float32):
        self.change, self.dtype, self.tensors = change, dtype, {}

    def receive(self, weights, version):
        for name, tensor in weights:
            self.tensors[name] = tensor.to(self.dtype, copy=True)
        self.change(self.tensors)

    def release(self):
        self.tensors.clear()

    def stored(self, name):
        return self.tensors.get(name, torch.empty(0, dtype=self.dtype))


def load(receiver: StoredWeights, tensors, compares: bool = True) -> int:
    return Loading(receiver, 1, compares).load(tensors.items())


@pytest.mark.parametrize("name", ["a", "large", "b", "c", "view"])
def test_a_stored_tensor_with_another_bit_is_named(tensors, name):
    def flip(stored):
        flat = stored[name].reshape(-1)
        flat[-1] = -flat[-1]
        stored[name] = flat.view(stored[name].shape)

    assert load(Stores(), tensors) == load(Stores(), tensors) != 0
    receiver = Stores(flip)
    with pytest.raises(
        ValueError, match=rf"Stores.receive, 1 of 6 parameters differ from what was sent, first .'{name}'"
    ):
        load(receiver, tensors)
    assert not receiver.tensors, "they are released"
    assert load(Stores(flip), tensors, compares=False) == 0, "not in a push without a comparison"


def test_stored_tensors_of_other_sizes_and_exchanged_words_are_named(tensors):
    def resize(stored):
        stored["b"] = torch.cat([stored["b"], torch.zeros(1)])  # the padding of 7 elements

    with pytest.raises(ValueError, match=r"1 of 6 parameters differ from what was sent, first \['b'\]"):
        load(Stores(resize), tensors)

    def exchange(stored):
        flat, old = stored["c"].view(-1), stored["c"].flatten().clone()
        flat[0:2], flat[2:4] = old[2:4], old[0:2]  # two words of 8 bytes of a row

    with pytest.raises(ValueError, match=r"1 of 6 parameters differ from what was sent, first \['c'\]"):
        load(Stores(exchange), tensors)


def test_a_stored_cast_is_that_of_torch(tensors):
    assert load(Stores(dtype=torch.bfloat16), tensors) == load(Stores(), tensors)


def test_memory_of_a_tensor_is_used_again_while_it_is_read():
    memory = torch.zeros(4)
    loading = Loading(Stores(), 1, True)
    loading.load((str(value), memory.fill_(value)) for value in (1.0, 2.0))
    assert {name: tensor.tolist() for name, tensor in loading.receiver.tensors.items()} == {
        "1.0": [1.0] * 4,
        "2.0": [2.0] * 4,
    }


def test_checks_are_due_at_the_first_version_and_at_multiples():
    last, due = None, []
    for version in (7, 8, 10, 10, 11, 20):
        if is_check_due(version, last, 10):
            last = version
            due.append(version)
    assert due == [7, 10, 20] and not is_check_due(0, None, 0)


class StoresSome(Stores):
    """Stores one of two parameters as it is sent, and the other one in another form."""

    def stored(self, name):
        return super().stored(name) if name == "a" else None


def test_a_parameter_that_is_stored_in_another_form_is_not_compared():
    weights = {"a": torch.ones(4), "b": torch.zeros(3)}
    first = load(StoresSome(), weights)
    assert first == load(StoresSome(), weights)
    assert first != load(StoresSome(), weights | {"b": torch.ones(3)})  # but it is in the checksum
