"""Layers of given values -> one value per key of the tree: second names, unknown keys, interpolations."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.aliases import renamed
from verl.config.errors import Problem, in_words, nearest_key
from verl.config.fields import Leaf, Tree, flatten, leaves, sections, unflatten
from verl.config.known_keys import known_key
from verl.config.sources import Given, Layer, has_interpolation

Named = list[tuple[str, Given]]
"""Key -> value, before it is known that each key has one value only."""


class Reader:
    """Reads layers (earlier ones give way) for one tree. `problems` and `notes` are filled on the way."""

    def __init__(self, tree: type[Tree], layers: list[Layer]):
        self.tree = tree
        self.layers = [self._said(layer) for layer in layers]
        self.problems: list[Problem] = []
        self.notes: list[str] = []

    def read(self) -> Layer:
        """Key of the tree -> value, resolved, with the place where it was given."""
        layers = [self._known(self._renamed(layer)) for layer in self.layers]
        resolved = self._resolver(layers)
        agreed = [self._agreed((key, value) for key, given in layer if (value := resolved(given))) for layer in layers]
        merged = self._merged(agreed)
        merged = self._merged([self._computed(layer, merged) for layer in agreed])
        return {key: self._as_text(key, given) for key, given in merged.items() if self._in_tree(key, given)}

    def _merged(self, layers: list[Layer]) -> Layer:
        """Later layers win. A free mapping that is set to null or {} forgets what was below it."""
        merged: Layer = {}
        for layer in layers:
            for key, given in layer.items():
                leaf = leaves(self.tree).get(key)
                if leaf and leaf.is_mapping:
                    merged = {name: value for name, value in merged.items() if not name.startswith(key + ".")}
                merged[key] = given
        return merged

    def _known(self, named: Named) -> Named:
        """Without the keys that nobody knows; each is a problem."""
        known = []
        for key, given in named:
            if self._leaf_of(key) or key in self.tree.dialect.computed or known_key(key, self.tree.known):
                known.append((key, given))
            else:
                self.problems.append(Problem(given.key, self._unknown(key, given), given.where))
        return known

    def _said(self, layer: Layer) -> Layer:
        """Without what says nothing: an empty section, and OmegaConf's '???' for a value still to come."""
        empty = sections(self.tree) | {name.rpartition(".")[0] for name in self.tree.dialect.names()}
        return {
            key: given
            for key, given in layer.items()
            if given.value != "???" and not (key in empty and (given.value is None or given.value == {}))
        }

    # ------------------------------------------------------------------------------------------------- second names

    def _renamed(self, layer: Layer) -> Named:
        """First names for second names. An older name that is null says nothing."""
        dialect, found = self.tree.dialect, []
        for spelled, given in layer.items():
            key = renamed(spelled, dialect.short)
            if key == spelled:
                key = renamed(spelled, dialect.older)
                if key != spelled:
                    if given.value is None:
                        continue
                    self.notes.append(f"{spelled} ({given.where}) is an older name of {key}: please rename it")
            found.append((key, given))
        return found

    def _agreed(self, named: Iterable[tuple[str, Given]]) -> Layer:
        """One value per key: two names of one key may stand side by side only when they agree."""
        layer: Layer = {}
        for key, given in named:
            other = layer.get(key)
            if other and _listed(other.value) != _listed(given.value):
                names = [f"{one.key}: {one.value} ({one.where})" for one in (other, given)]
                self.problems.append(Problem(key, f"given twice, and differently: {names[0]} and {names[1]}; keep one"))
            layer[key] = given
        return layer

    def _computed(self, layer: Layer, merged: Layer) -> Layer:
        """Names whose value must be worked out from others."""
        computed, found = self.tree.dialect.computed, []

        def lookup(key: str) -> Any:
            return merged[key].value if key in merged else leaves(self.tree)[key].default

        for key, given in layer.items():
            if key not in computed:
                found.append((key, given))
            elif given.value is not None:
                try:
                    values = computed[key](given.value, lookup)
                except ValueError as error:
                    self.problems.append(Problem(key, str(error), given.where))
                    continue
                for meant, value in values.items():
                    if meant != key:
                        self.notes.append(f"{key}: {given.value} ({given.where}) is read as {meant}: {value}")
                    found.append((meant, given.moved(value)))
        return self._agreed(found)

    # ----------------------------------------------------------------------------------------------- interpolations

    def _resolver(self, layers: list[Named]) -> Callable[[Given], Given | None]:
        """A function that resolves what a value refers to: any key, under its first or second name, or its default.

        It gives None, and a problem, where a reference leads nowhere.
        """
        if not any(has_interpolation(given.value) for layer in layers for _, given in layer):
            return lambda given: given
        values = {key: _plain(leaf) for key, leaf in leaves(self.tree).items()}
        for layer in layers:
            values |= {key: given.value for key, given in layer}
            values |= {given.key: given.value for _, given in layer if given.key not in sections(self.tree)}
        tree = OmegaConf.create(unflatten(values))

        def resolve(given: Given) -> Given | None:
            if not has_interpolation(given.value):
                return given
            try:
                value = OmegaConf.select(tree, given.key)
            except OmegaConfBaseException as error:
                what = f"{given.value} cannot be resolved: {str(error).splitlines()[0]}{self._nearest_reference(given)}"
                self.problems.append(Problem(given.key, what, given.where))
                return None
            return given.moved(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)

        return resolve

    def _nearest_reference(self, given: Given) -> str:
        """The key that a reference which leads nowhere was probably meant for."""
        wanted = re.findall(r"\$\{([\w.]+)\}", str(given.value))
        near = [nearest_key(key, leaves(self.tree)) for key in wanted if key not in leaves(self.tree)]
        return f"; did you mean {near[0]}?" if near and near[0] else ""

    # ------------------------------------------------------------------------------------------ keys that are not here

    def _in_tree(self, key: str, given: Given) -> bool:
        """Whether the tree has this key. If not, it is a key of verl: other values than verl's default are problems."""
        if self._leaf_of(key):
            return True
        values = flatten({key: given.value}) if isinstance(given.value, Mapping) else {key: given.value}
        for name, value in values.items():
            known = known_key(name, self.tree.known)
            if not known.accepts(value):
                only = f"only verl's default {in_words(known.default)} is accepted here"
                what = f"found {in_words(value)}, but {only}: {known.instead}"
                self.problems.append(Problem(given.key if name == key else name, what, given.where))
        return False

    def _leaf_of(self, key: str) -> Leaf | None:
        """The leaf that holds a key: the key's own, or a free mapping above it."""
        known = leaves(self.tree)
        if key in known:
            return known[key]
        names = key.split(".")
        above = (known.get(".".join(names[:depth])) for depth in range(1, len(names)))
        return next((leaf for leaf in above if leaf and leaf.is_mapping), None)

    def _unknown(self, key: str, given: Given) -> str:
        known, dialect = leaves(self.tree), self.tree.dialect
        names = key.split(".")
        for depth in range(1, len(names)):
            value_key = ".".join(names[:depth])
            if value_key in known:
                return f"{value_key} holds {known[value_key].expected()}, nothing is below it"
        if key in sections(self.tree):
            return f"found {in_words(given.value)}, but this is a section with the keys {self._keys_below(key)}"
        near = nearest_key(given.key, [*known, *dialect.names()])
        if near:
            return f"unknown key; did you mean {near}?"
        section = next((s for s in _above(key) if s in sections(self.tree)), "")
        where = f"keys of {section}" if section else "top-level keys"
        return f"unknown key ({where}: {self._keys_below(section)})"

    def _keys_below(self, section: str) -> str:
        start = f"{section}." if section else ""
        below = {key[len(start) :].split(".")[0]: None for key in leaves(self.tree) if key.startswith(start)}
        return ", ".join(below)

    def _as_text(self, key: str, given: Given) -> Given:
        """Where text is expected, what was written counts, not what YAML made of it (012 is no number there)."""
        leaf = leaves(self.tree).get(key)
        guessed = isinstance(given.value, bool | int | float) and given.text is not None
        return given.moved(given.text) if leaf and leaf.is_text and guessed else given


def _plain(leaf: Leaf) -> Any:
    return leaf.follows or (list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default)


def _above(key: str) -> list[str]:
    """The sections that hold a key, the nearest first."""
    names = key.split(".")[:-1]
    return [".".join(names[:depth]) for depth in range(len(names), 0, -1)]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]
