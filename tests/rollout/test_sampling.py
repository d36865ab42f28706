"""Sampling: exact frequencies and log-probs for every option, and random numbers that depend on the row alone."""

import math

import pytest
import torch

from tests.rollout.contract import draw
from verl.rollout.request import SamplingParams
from verl.rollout.sampling import choose, filter_logits, uniform

LOGITS = [1.0, 0.2, -0.5, 1.7, 0.9, -3.0, 0.2, 1.1]


def distribution(logits: list[float], temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0) -> list[float]:
    """The exact probabilities by plain loops over Python numbers, in the order of the definition."""
    weights = [math.exp(x / temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    if top_k > 0:
        order = order[:top_k]
    total, before, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if before / total < top_p:
            kept.append(i)
        before += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.3},
    {"temperature": 1.4, "top_k": 6, "top_p": 0.8, "min_p": 0.35},
    {"temperature": 1.4, "top_p": 0.8, "min_p": 0.35},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("vocabulary", [8, 6000])
def test_frequencies_and_log_probs_are_exact(options, vocabulary):
    # in the larger vocabulary the same tokens stand far apart, and the rest weighs next to nothing
    places = [i * (vocabulary // 8) for i in range(8)]
    logits = torch.full((vocabulary,), -60.0)
    logits[places] = torch.tensor(LOGITS)
    exact = torch.tensor(distribution(LOGITS, **options), dtype=torch.float64)
    count = 20_000 if vocabulary == 8 else 4000
    params = SamplingParams(1, (), **options)
    # 500 rows at a time: those of a large vocabulary fit the cache of the processor
    parts = [draw(logits.expand(len(ids), -1), params, ids, 4) for ids in torch.arange(count).split(500)]
    tokens, log_probs = map(torch.cat, zip(*parts))
    index = torch.searchsorted(torch.tensor(places), tokens)
    assert torch.equal(torch.tensor(places)[index], tokens)
    torch.testing.assert_close(log_probs.double(), exact[index].log(), atol=1e-6, rtol=1e-6)
    found = torch.bincount(index, minlength=8).double()
    assert (found[exact == 0] == 0).all()
    possible = exact > 0
    chi_square = ((found - exact * count) ** 2 / (exact * count))[possible].sum()
    assert chi_square < 26, "the 99.95 % point of 7 degrees of freedom"


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_top_p_of_sharp_and_flat_rows_by_its_definition(top_p):
    """Rows of which few tokens have the mass, and rows that need more than are looked at first."""
    torch.manual_seed(0)
    sharpness = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0])[:, None]
    logits = torch.randn(7, 5000) * sharpness + torch.randn(7, 5000) * 1e-3
    kept = filter_logits(logits, SamplingParams(1, (), top_p=top_p)).isfinite()
    for row, found in zip(logits.double(), kept):
        ordered, index = row.softmax(0).sort(descending=True)
        before = ordered.cumsum(0) - ordered
        expected = set(index[before < top_p].tolist())
        unsure = set(index[(before - top_p).abs() < 1e-6].tolist())  # where float32 may round to the other side
        assert set(found.nonzero()[:, 0].tolist()) ^ expected <= unsure
        assert len(unsure) <= 1
    assert torch.equal(kept[2:3], filter_logits(logits[2:3], SamplingParams(1, (), top_p=top_p)).isfinite())


def test_greedy_takes_the_most_probable_and_reports_the_unscaled_log_prob():
    tokens, log_probs = draw(torch.tensor([LOGITS]), SamplingParams(1, (), temperature=0), torch.tensor([0]), 0)
    assert tokens.tolist() == [3]
    assert log_probs[0].item() == pytest.approx(math.log(distribution(LOGITS)[3]), abs=1e-6)


def test_uniforms_at_the_ends_give_the_first_and_the_last_possible_token():
    for size, tail in ((6, 0), (6000, 0), (6001, 3)):
        logits = torch.randn(2, size)
        logits[:, 0], logits[:, size - 1 - tail :] = -math.inf, -math.inf
        logits[:, size - 2 - tail] = 0.0
        tokens, _ = choose(logits, SamplingParams(1, ()), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
        assert tokens.tolist() == [1, size - 2 - tail]


def test_both_searches_give_the_same_tokens():
    torch.manual_seed(0)
    logits, u = torch.randn(500, 512), torch.rand(500, dtype=torch.float64)
    small, _ = choose(logits, SamplingParams(1, ()), u)
    wide = torch.nn.functional.pad(logits, (0, 6000), value=-math.inf)
    large, _ = choose(wide, SamplingParams(1, ()), u)
    assert torch.equal(small, large)


def test_random_numbers_depend_on_seed_sample_and_position_and_nothing_else():
    ids = torch.tensor([3, 900, 3, -1])
    a = uniform(7, ids, torch.tensor([0, 5, 0, 2]))
    assert a[0] == a[2] and len(set(a.tolist())) == 3
    assert a[1] == uniform(7, torch.tensor([900]), 5)[0]
    assert uniform(8, ids, 0)[0] != a[0]
    grid = uniform(7, ids[:, None], torch.arange(6))
    assert grid.shape == (4, 6) and grid[1, 5] == a[1]


def test_random_numbers_follow_the_published_generator():
    """SplitMix64 by Python integers: the state of a sample, then one output per position."""
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, sample, position in ((0, 0, 0), (42, 1, 7), (2**40 + 1, 123456789, 4000)):
        state = mix((sample * golden + mix(seed)) & mask)
        expected = (mix((state + (position + 1) * golden) & mask) >> 11) * 2.0**-53
        assert uniform(seed, torch.tensor([sample]), position)[0].item() == expected


def test_random_numbers_are_uniform_and_not_correlated():
    u = uniform(0, torch.arange(300)[:, None], torch.arange(300))
    counts = torch.histc(u.flatten().float(), 100, 0, 1)
    assert (((counts - 900) ** 2) / 900).sum() < 155, "the 99.97 % point of 99 degrees of freedom"
    centred = u - 0.5
    for pair in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1])):
        assert abs((pair[0] * pair[1]).mean() * 12) < 4 / math.sqrt(89_700)


def test_broken_logits_name_the_row():
    logits = torch.zeros(3, 5)
    logits[1, 2] = math.nan
    with pytest.raises(ValueError, match=r"row 1 \(sample id 11\)"):
        draw(logits, SamplingParams(1, ()), torch.tensor([10, 11, 12]), 0)
    with pytest.raises(ValueError, match=r"row 0 \(sample id 10\)"):
        draw(torch.full((3, 5), -math.inf), SamplingParams(1, ()), torch.tensor([10, 11, 12]), 0)


def test_filters_keep_the_best_token_and_do_not_change_the_input():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    kept = filter_logits(logits, SamplingParams(1, (), top_p=1e-9, min_p=1.0, top_k=1))
    assert kept.tolist() == [[-math.inf, 5.0, -math.inf]]
    assert logits.tolist() == [[0.0, 5.0, 1.0]]


@pytest.mark.parametrize("vocabulary", [8, 10_000])
def test_the_smallest_values_leave_the_best_token(vocabulary):
    """Also those that float32 rounds to 0."""
    logits = torch.linspace(-9, 9, vocabulary)[None]
    for given in ({"top_p": 1e-300}, {"top_p": 1e-300, "top_k": 3}, {"temperature": 1e-5, "min_p": 1e-300}):
        tokens, log_probs = draw(logits, SamplingParams(1, (), **given), torch.tensor([7]), 0)
        assert tokens.tolist() == [vocabulary - 1] and log_probs.tolist() == [0.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"top_k": 0}, r"top_k must be -1 \(off\) or at least 1, found 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, found 0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"temperature": 1e-300}, "temperature=1e-300: expected 0 or at least 1e-05"),
    ],
)
def test_parameters_that_select_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 4, "stop_token_ids": (), **given})
