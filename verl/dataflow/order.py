"""Which operator waits for which, and which columns it sees: pure functions over the declarations.

An operator that says where it runs (`on`) depends on what it reads from, and on what would read or write the same
column otherwise; one that does not is depended on by all and depends on all. So the order that is left open changes no
number, provided that an operator sees the same columns in any order: those of the operators that it depends on, which
have all ended, and those that it declares to read. What others add beside it is hidden from it.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from verl.dataflow.operator import Operator


@dataclass(frozen=True)
class Turn:
    """When an operator runs. ancestors: the positions of all that it depends on, directly or not. hidden: columns
    that operators beside it write, which it must not see."""

    ancestors: frozenset[int]
    hidden: frozenset[str]


def depends(later: Operator, earlier: Operator) -> bool:
    """Whether `later` must wait for `earlier`, whatever place they run in."""
    if later.on is None or earlier.on is None:
        return True
    written, touched = set(earlier.writes), {*earlier.reads, *earlier.writes}
    return bool(written & set(later.reads) or touched & set(later.writes))


def turns(operators: Sequence[Operator]) -> list[Turn]:
    """The turn of every operator of a list."""
    ancestors: list[frozenset[int]] = []
    for i, op in enumerate(operators):
        direct = [j for j in range(i) if depends(op, operators[j])]
        ancestors.append(frozenset(direct).union(*(ancestors[j] for j in direct)))
    found = []
    for i, op in enumerate(operators):
        beside = [o for j, o in enumerate(operators) if j != i and j not in ancestors[i] and i not in ancestors[j]]
        written = {column for other in beside for column in other.writes}
        found.append(Turn(ancestors[i], frozenset(written - set(op.reads))))
    return found


def waits(turn: Sequence[Turn], places: Sequence[Hashable]) -> list[frozenset[int]]:
    """For every operator those that must have ended when it starts: its ancestors, and the earlier ones of its place.

    One place does its work in list order: the calls of one set of processes come in the same order in every run.
    """
    return [turn[i].ancestors | {j for j in range(i) if places[j] == place} for i, place in enumerate(places)]
