"""Layers of settings -> one value per field: aliases, unknown keys, unsupported keys of public verl, interpolations."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.errors import Problem, format_value, nearest_key
from verl.config.fields import ConfigField, Schema, fields_of, flatten, sections_of, unflatten
from verl.config.public.aliases import NULL_IS_DEFAULT
from verl.config.public.upstream import UpstreamKey, ignored_key, upstream_key
from verl.config.sources import REMOVED, Layer, Setting, has_interpolation

Named = list[tuple[str, Setting]]
"""(key, setting) pairs in which a key may occur twice, under two of its names."""


_ACTOR = "actor_rollout_ref.actor"
_REWARD = "reward.custom_reward_function"
_FREE_SETTINGS = {
    "algorithm": "algorithm.adv_kwargs",
    _ACTOR: f"{_ACTOR}.policy_loss.loss_kwargs",
    f"{_ACTOR}.policy_loss": f"{_ACTOR}.policy_loss.loss_kwargs",
    "data": "data.custom_cls.kwargs",
    "data.custom_cls": "data.custom_cls.kwargs",
    "reward": f"{_REWARD}.reward_kwargs",
    _REWARD: f"{_REWARD}.reward_kwargs",
}
"""Section -> the field for the additional settings of a custom estimator, loss, dataset or reward."""


class Reader:
    """Reads layers for one schema; later layers win.

    Attributes:
        problems: what is wrong with the settings; filled by `read`.
        notes: warnings; filled by `read`.
        source_of: key -> index of the layer that sets it; filled by `read`.
    """

    def __init__(self, schema: type[Schema], layers: list[Layer]):
        self.schema = schema
        self.layers = [self._without_empty(layer) for layer in layers]
        self.problems: list[Problem] = []
        self.notes: list[str] = []
        self.source_of: dict[str, int] = {}
        self._ignored: Layer = {}

    def read(self) -> Layer:
        """Key of the schema -> resolved value with its origin."""
        layers = [self._known(self._renamed(layer)) for layer in self.layers]
        resolved = self._resolver(layers)
        found = [[(key, value) for key, given in layer if (value := resolved(given))] for layer in layers]
        agreed = [self._agreed((key, given) for key, given in layer if not self._unset(key, given)) for layer in found]
        merged = self._merged(agreed)
        computed = [self._computed(layer, merged) for layer in agreed]
        merged = self._merged(computed)
        self.source_of = {key: index for index, layer in enumerate(computed) for key in layer}
        self._report_ignored(resolved)
        return {key: self._as_string(key, given) for key, given in merged.items() if self._in_schema(key, given)}

    def _unset(self, key: str, given: Setting) -> bool:
        """Whether null means the default: for older names, and for keys that are null in a release of public verl."""
        return given.value is None and (self.schema.aliases.is_deprecated(given.key) or key in NULL_IS_DEFAULT)

    def _merged(self, layers: list[Layer]) -> Layer:
        """Later layers win. A free mapping that is set to null or {}, and `~key`, drop the earlier keys below them."""
        merged: Layer = {}
        for layer in layers:
            for key, given in layer.items():
                found = fields_of(self.schema).get(key)
                if given.value == REMOVED or (found and found.is_mapping):
                    merged = {name: value for name, value in merged.items() if not name.startswith(key + ".")}
                merged[key] = given
        return {key: given for key, given in merged.items() if given.value != REMOVED}

    def _known(self, named: Named) -> Named:
        """Drop unknown keys (one problem each) and keys without effect (listed in a note)."""
        known = []
        for key, given in named:
            removed_section = given.value == REMOVED and key in sections_of(self.schema)
            if ignored_key(key, self.schema.upstream, has_field=self._field_of(key) is not None):
                self._ignored[key] = given
            elif removed_section or self._field_of(key) or key in self.schema.aliases.computed or self._upstream(key):
                known.append((key, given))
            elif given.added and (own := self._free_setting(key)) and not self._name_of_another(key):
                known.append((own, given))
            else:
                self.problems.append(Problem(given.key, self._unknown(key, given), given.where))
        return known

    def _report_ignored(self, resolved: Callable[[Setting], Setting | None]) -> None:
        """Add notes on the ignored keys, and a problem for each that is true without the key that it needs."""
        plain = dict(self._ignored)
        for key, given in self._ignored.items():
            found = ignored_key(key, self.schema.upstream, has_field=False)
            if not found or not found.needs or given.value == REMOVED:
                continue
            value, needed_key = resolved(given), f"{key.rpartition('.')[0]}.{found.needs}"
            needed = self._ignored.get(needed_key)
            if value is None or value.value is not True:
                continue
            if needed is None or (needed.value in (None, REMOVED) or not str(needed.value).strip()):
                what = f"true, but {found.needs} is not set: remove this key ({found.instead})"
                self.problems.append(Problem(given.key, what, given.where))
            else:
                self.notes.append(f"{given.key}: true and {found.needs} have no effect: {found.instead}")
                del plain[key]
                plain.pop(needed_key, None)
        self.notes += ignored_notes(plain, self.schema.upstream)

    def _name_of_another(self, key: str) -> str | None:
        """The key of the schema that another library calls by the last name of `key`."""
        from verl.config.public.trl import key_of  # only for a key that is not known

        return key_of(key.rpartition(".")[2], self.schema.upstream)

    def _free_setting(self, key: str) -> str | None:
        """The key of a parameter of a custom function or class, which a user has added to its section."""
        section, _, name = key.rpartition(".")
        free = _FREE_SETTINGS.get(section)
        return f"{free}.{name}" if free in fields_of(self.schema) else None

    def _upstream(self, key: str) -> UpstreamKey | None:
        return upstream_key(key, self.schema.upstream)

    def _without_empty(self, layer: Layer) -> Layer:
        """Drop empty sections, and OmegaConf's '???' for a value that is not set."""
        empty = sections_of(self.schema) | {name.rpartition(".")[0] for name in self.schema.aliases.names()}
        empty -= fields_of(self.schema).keys()  # a free mapping
        return {
            key: given
            for key, given in layer.items()
            if given.value != "???" and not (key in empty and (given.value is None or given.value == {}))
        }

    # ------------------------------------------------------------------------------------------------------- aliases

    def _renamed(self, layer: Layer) -> Named:
        """Resolve short and deprecated names. A deprecated name that is null is dropped."""
        aliases, found = self.schema.aliases, []
        for spelled, given in layer.items():
            key = aliases.resolve(spelled)
            if aliases.is_deprecated(spelled) and given.value != REMOVED:
                if given.value is None:
                    continue
                self.notes.append(f"{spelled} ({given.where}) is deprecated: rename it to {key}")
            found.append((key, given))
        return found

    def _agreed(self, named: Iterable[tuple[str, Setting]]) -> Layer:
        """One value per key: two names of one key in one layer must have the same value."""
        layer: Layer = {}
        for key, given in named:
            other = layer.get(key)
            if other and _as_list(other.value) != _as_list(given.value):
                names = [f"{one.key}: {one.value} ({one.where})" for one in (other, given)]
                self.problems.append(
                    Problem(key, f"set twice with different values, {names[0]} and {names[1]}; keep one")
                )
            layer[key] = given
        return layer

    def _computed(self, layer: Layer, merged: Layer) -> Layer:
        """Replace the aliases whose value is computed from other keys."""
        computed, found = self.schema.aliases.computed, []

        def lookup(key: str) -> Any:
            known = fields_of(self.schema)
            return merged[key].value if key in merged else known[key].default if key in known else None

        for key, given in layer.items():
            if key not in computed or given.value == REMOVED:
                found.append((key, given))
            elif given.value is not None:
                try:
                    values = computed[key](given.value, lookup)
                except ValueError as error:
                    self.problems.append(Problem(key, str(error), given.where))
                    continue
                for meant, value in values.items():
                    if meant != key and not meant.startswith(f"{key}."):  # placement=auto needs no translation
                        self.notes.append(f"{key}: {given.value} ({given.where}) sets {meant}: {value}")
                    found.append((meant, given.with_value(value)))
        return self._agreed(found)

    # ------------------------------------------------------------------------------------------------ interpolations

    def _resolver(self, layers: list[Named]) -> Callable[[Setting], Setting | None]:
        """A function that resolves references to any key, by its name or an alias, or to its default.

        It returns None, and adds a problem, if a reference cannot be resolved.
        """
        ignored = list(self._ignored.items())
        if not any(has_interpolation(given.value) for layer in [ignored, *layers] for _, given in layer):
            return lambda given: given
        nulls = [key for layer in self.layers for key, given in layer.items() if given.value is None]
        values = dict.fromkeys(nulls) | {key: _plain(found) for key, found in fields_of(self.schema).items()}
        for layer in [ignored, *layers]:
            layer = [(key, given) for key, given in layer if given.value != REMOVED]
            values |= {key: given.value for key, given in layer}
            values |= {given.key: given.value for _, given in layer if given.key not in sections_of(self.schema)}
        config = OmegaConf.create(unflatten(values))

        def resolve(given: Setting) -> Setting | None:
            if not has_interpolation(given.value):
                return given
            try:
                value = OmegaConf.select(config, given.key)
            except OmegaConfBaseException as error:
                what = f"{given.value} cannot be resolved: {str(error).splitlines()[0]}{self._nearest_reference(given)}"
                self.problems.append(Problem(given.key, what, given.where))
                return None
            return given.with_value(
                OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            )

        return resolve

    def _nearest_reference(self, given: Setting) -> str:
        """The key that an unresolvable reference was probably meant for."""
        wanted = re.findall(r"\$\{([\w.]+)\}", str(given.value))
        known = fields_of(self.schema)
        near = [nearest_key(key, known) for key in wanted if key not in known]
        return f"; did you mean {near[0]}?" if near and near[0] else ""

    # ----------------------------------------------------------------------------------------- keys without a field

    def _in_schema(self, key: str, given: Setting) -> bool:
        """Whether the schema has this key. Otherwise it is a key of public verl, whose value is checked."""
        if self._field_of(key):
            return True
        values = flatten({key: given.value}) if isinstance(given.value, Mapping) else {key: given.value}
        for name, value in values.items():
            known = self._upstream(name)
            if not known.accepts(value):
                accepted = ", ".join(map(format_value, known.accepted))
                what = f"{format_value(value)} is not supported: {known.instead} (accepted: {accepted})"
                self.problems.append(Problem(given.key if name == key else name, what, given.where))
        return False

    def _field_of(self, key: str) -> ConfigField | None:
        """The field that holds a key: its own, or a free mapping above it."""
        known = fields_of(self.schema)
        if key in known:
            return known[key]
        names = key.split(".")
        above = (known.get(".".join(names[:depth])) for depth in range(1, len(names)))
        return next((found for found in above if found and found.is_mapping), None)

    def _unknown(self, key: str, given: Setting) -> str:
        known, aliases = fields_of(self.schema), self.schema.aliases
        names = key.split(".")
        for depth in range(1, len(names)):
            value_key = ".".join(names[:depth])
            if value_key in known:
                return f"unknown key: {value_key} is a value ({known[value_key].expected()}), not a section"
        if key in sections_of(self.schema):
            return f"found {format_value(given.value)}, expected a section with the keys {self._keys_below(key)}"
        own = self._free_setting(key)
        if meant := self._name_of_another(key):
            custom = f" (a parameter of a custom function of this name: {own})" if given.added and own else ""
            return f"unknown key; did you mean {meant}?{custom}"
        near = nearest_key(given.key, [*known, *aliases.names()]) if key == given.key else nearest_key(key, known)
        if near:
            return f"unknown key; did you mean {near}?"
        if own:
            return f"unknown key; set a parameter of a custom function or class as {own}=... or +{key}=..."
        sections = dict.fromkeys(section for name in known for section in _sections_above(name))  # in schema order
        # leading sections are often omitted: optim.name for actor_rollout_ref.actor.optim.name
        full = [name for above in _sections_above(key) for name in sections if f".{name}".endswith(f".{above}")]
        section = full[0] if full else ""
        where = f"keys of {section}" if section else "top-level keys"
        return f"unknown key ({where}: {self._keys_below(section)})"

    def _keys_below(self, section: str) -> str:
        start = f"{section}." if section else ""
        below = {key[len(start) :].split(".")[0]: None for key in fields_of(self.schema) if key.startswith(start)}
        return ", ".join(below)

    def _as_string(self, key: str, given: Setting) -> Setting:
        """A string field takes the value as written, not as YAML reads it (012 is not a number there)."""
        found = fields_of(self.schema).get(key)
        converted = isinstance(given.value, bool | int | float) and given.text is not None
        return given.with_value(given.text) if found and found.is_string and converted else given


def ignored_notes(ignored: Layer, schema: str | None) -> list[str]:
    """Return one note that lists the keys without effect whose value is not public verl's default.

    More than three keys of one section are listed as the section and their number, and so are all `_target_` keys.
    """
    names: dict[str, list[str]] = {}
    for key, given in ignored.items():
        found = ignored_key(key, schema, has_field=False)
        if given.value != REMOVED and not (found and found.is_default(given.value)):
            annotation = key.rpartition(".")[2] == "_target_"
            names.setdefault("_target_" if annotation else key.rpartition(".")[0], []).append(given.key)
    listed: list[str] = []
    for section, keys in names.items():
        several = section == "_target_" or (section and len(keys) > 3)
        below = "" if section == "_target_" else ".*"
        listed += [f"{section}{below} ({len(keys)} keys)"] if several else keys
    count = sum(map(len, names.values()))
    return [f"ignored: {count} key{'s' * (count > 1)} without effect here: {', '.join(listed)}"] if count else []


def _plain(found: ConfigField) -> Any:
    return found.default_from or (list(found.default) if isinstance(found.default, tuple) else found.default)


def _sections_above(key: str) -> list[str]:
    """The sections that hold a key, the innermost first."""
    names = key.split(".")[:-1]
    return [".".join(names[:depth]) for depth in range(len(names), 0, -1)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]
