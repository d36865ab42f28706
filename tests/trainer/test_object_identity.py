"""The fingerprint of a reward that is given as an object: its source, and what is bound to it."""

import functools
from typing import Any

from verl.trainer.state.identity import object_fingerprint


def letters(solution_str, ground_truth, data_source, *, bonus=0.0):
    return len(solution_str) + bonus


def other_letters(solution_str, ground_truth, data_source):
    return float(solution_str.count("a"))


def test_the_fingerprint_of_a_reward():
    def made(bonus, seen):
        def score(solution_str, ground_truth, data_source):
            seen.append(solution_str)
            return bonus

        return score

    class Scorer:
        def __init__(self, scale):
            self.scale, self._calls = scale, []

        def __call__(self, solution_str, ground_truth, data_source):
            return self.scale

    same = [(letters, letters), (made(1, []), made(1, ["a"])), (Scorer(2.0), Scorer(2.0)), (Scorer, Scorer)]
    same += [(functools.partial(letters, bonus=1.0), functools.partial(letters, bonus=1.0))]
    differs = [(letters, other_letters), (made(1, []), made(2, [])), (Scorer(2.0), Scorer(3.0)), (letters, Scorer)]
    differs += [(letters, functools.partial(letters, bonus=1.0)), (Scorer(1.0).__call__, Scorer(2.0).__call__)]
    texts = ["def score(solution_str): return 1", "def score(solution_str): return 2"]  # without a file
    scopes: list[dict[str, Any]] = [{}, {}]
    for text, scope in zip(texts, scopes):
        exec(text, scope)
    differs.append((scopes[0]["score"], scopes[1]["score"]))
    assert all(object_fingerprint(one) == object_fingerprint(other) for one, other in same)
    assert all(object_fingerprint(one) != object_fingerprint(other) for one, other in differs)
