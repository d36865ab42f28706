"""Layers of settings -> one value per field: aliases, unknown keys, unsupported keys of public verl, interpolations."""

import difflib
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from verl.config.errors import Problem, format_value, nearest_key
from verl.config.fields import ConfigField, Schema, fields_of, flatten, sections_of, unflatten
from verl.config.public.aliases import NULL_IS_DEFAULT
from verl.config.public.upstream import ignored_key, upstream_key
from verl.config.sources import REMOVED, Layer, Setting, has_interpolation
from verl.utils.redaction import remember_expression, remember_variable

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
    "data.kwargs": "data.custom_cls.kwargs",
    "reward": f"{_REWARD}.reward_kwargs",
    _REWARD: f"{_REWARD}.reward_kwargs",
}
"""Section -> the field for the additional settings of a custom estimator, loss, dataset or reward."""


def _read_variable(name: str, *default: Any) -> Any:
    """`${oc.env:NAME}` of OmegaConf, which remembers that a setting has read the variable."""
    if name in os.environ:
        remember_variable(name)
    return oc.env(name, *default)


with warnings.catch_warnings():  # OmegaConf 2.4 renames this function to one that 2.3 has with another meaning
    warnings.simplefilter("ignore")
    OmegaConf.register_new_resolver("oc.env", _read_variable, replace=True)


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
        layers = [self._known(self._renamed(self._expanded(layer))) for layer in self.layers]
        resolved = self._resolver(layers)
        interpolated = [[(key, value) for key, setting in layer if (value := resolved(setting))] for layer in layers]
        layers = [[item for item in layer if not self._unset(*item)] for layer in interpolated]
        agreed = [self._agreed(layer) for layer in layers]
        merged = self._merged(agreed)
        computed = [self._computed(layer, merged) for layer in agreed]
        merged = self._merged(computed)
        self.source_of = {key: index for index, layer in enumerate(computed) for key in layer}
        self.notes += ignored_notes(self._ignored, self.schema.upstream)
        return {
            key: self._as_declared(key, setting) for key, setting in merged.items() if self._in_schema(key, setting)
        }

    def _unset(self, key: str, setting: Setting) -> bool:
        """Whether null means the default: for older names, and for keys that are null in a release of public verl."""
        return setting.value is None and (self.schema.aliases.is_deprecated(setting.key) or key in NULL_IS_DEFAULT)

    def _merged(self, layers: list[Layer]) -> Layer:
        """Later layers win. A free mapping that is set to null or {}, and `~key`, drop the earlier keys below them."""
        merged: Layer = {}
        for layer in layers:
            for key, setting in layer.items():
                field = fields_of(self.schema).get(key)
                if setting.value == REMOVED or (field and field.is_mapping):
                    merged = {name: value for name, value in merged.items() if not name.startswith(key + ".")}
                merged[key] = setting
        return {key: setting for key, setting in merged.items() if setting.value != REMOVED}

    def _known(self, named: Named) -> Named:
        """Drop unknown keys (one problem each) and keys without effect (listed in a note)."""
        known = []
        switches = {key.rpartition(".enable") for key, setting in named if setting.added and setting.value is False}
        off = {f"{section}." for section, end, rest in switches if end and section not in sections_of(self.schema)}
        for key, setting in named:
            removed_section = setting.value == REMOVED and key in sections_of(self.schema)
            has_field = self._field_of(key) or key in self.schema.aliases.computed
            if ignored_key(key, self.schema.upstream, has_field=self._field_of(key) is not None):
                self._ignored[key] = setting
            elif removed_section or has_field or upstream_key(key, self.schema.upstream):
                known.append((key, setting))
            elif setting.added and not self._misspelled(key) and (free_key := self._free_setting(key)):
                known.append((free_key, setting))
            elif setting.added and key.startswith(tuple(off)):
                self._ignored[key] = setting
            elif setting.added and setting.value in (None, False, [], {}) and not self._nearest(key, setting):
                self._ignored[key] = setting  # a fork's own feature, which is off
            else:
                self.problems.append(Problem(setting.key, self._unknown(key, setting), setting.location))
        return known

    def _name_of_another(self, key: str) -> str | None:
        """The key of the schema that another library calls by the last name of `key`."""
        from verl.config.public.trl import key_of  # only for a key that is not known

        return key_of(key.rpartition(".")[2], self.schema.upstream)

    def _misspelled(self, key: str) -> str | None:
        """The key of the schema that a key nearly is, or that another library calls so."""
        sections = sections_of(self.schema)
        section = next((above for above in _sections_above(key) if above in sections), "")
        name = key.removeprefix(f"{section}.").partition(".")[0]  # of a section that is not known, if there is one
        near = difflib.get_close_matches(name, self._names_below(section), n=1, cutoff=0.85)
        return self._name_of_another(key) or (f"{section}.{near[0]}" if section and near else None)

    def _nearest(self, key: str, setting: Setting) -> str | None:
        """The key, or the alias if the setting has no other name, that a key is most likely a typo of."""
        known, aliases = fields_of(self.schema), self.schema.aliases
        return nearest_key(setting.key, [*known, *aliases.names()]) if key == setting.key else nearest_key(key, known)

    def _free_setting(self, key: str) -> str | None:
        """The key of a parameter of a custom function or class, which a user has added at or below its section."""
        for section in _sections_above(key):
            if (free := _FREE_SETTINGS.get(section)) in fields_of(self.schema):
                return f"{free}.{key.removeprefix(f'{section}.')}"
        return None

    def _without_empty(self, layer: Layer) -> Layer:
        """Drop empty sections, and OmegaConf's '???' for a value that is not set."""
        empty = sections_of(self.schema) | {name.rpartition(".")[0] for name in self.schema.aliases.names()}
        empty -= fields_of(self.schema).keys()  # a free mapping
        return {
            key: setting
            for key, setting in layer.items()
            if setting.value != "???" and not (key in empty and (setting.value is None or setting.value == {}))
        }

    def _expanded(self, layer: Layer) -> Layer:
        """Replace a reference to a section by references to the keys that any layer sets below it."""
        expanded: Layer = {}
        for key, setting in layer.items():
            reference = key in sections_of(self.schema) and _reference(setting.value)
            if not reference:
                expanded[key] = setting
                continue
            names = {name for other in self.layers for name in other if name.startswith(f"{reference}.")}
            for name in sorted(names):
                below = key + name.removeprefix(reference)
                expanded[below] = replace(setting, key=below, value=f"${{{name}}}")
        return expanded

    # ------------------------------------------------------------------------------------------------------- aliases

    def _renamed(self, layer: Layer) -> Named:
        """Resolve short and deprecated names. One that is null, or refers to its own key, is dropped."""
        aliases, renamed = self.schema.aliases, []
        for spelled, setting in layer.items():
            key = aliases.resolve(spelled)
            reference = _reference(setting.value)
            if key != spelled and reference and aliases.resolve(reference) == key:
                continue
            if aliases.is_deprecated(spelled) and setting.value != REMOVED:
                if setting.value is None:
                    continue
                self.notes.append(f"{spelled} ({setting.location}) is deprecated: rename it to {key}")
            renamed.append((key, setting))
        return renamed

    def _agreed(self, named: Iterable[tuple[str, Setting]]) -> Layer:
        """One value per key: two names of one key in one layer must have the same value."""
        layer: Layer = {}
        for key, setting in named:
            other = layer.get(key)
            if other and _as_list(other.value) != _as_list(setting.value):
                names = [f"{item.key}: {item.value} ({item.location})" for item in (other, setting)]
                self.problems.append(
                    Problem(key, f"set twice with different values, {names[0]} and {names[1]}; keep one")
                )
            layer[key] = setting
        return layer

    def _computed(self, layer: Layer, merged: Layer) -> Layer:
        """Replace the aliases whose value is computed from other keys."""
        computed, settings = self.schema.aliases.computed, []

        def lookup(key: str) -> Any:
            known = fields_of(self.schema)
            return merged[key].value if key in merged else known[key].default if key in known else None

        for key, setting in layer.items():
            if key not in computed or setting.value == REMOVED:
                settings.append((key, setting))
            elif setting.value is not None:
                try:
                    values = computed[key](setting.value, lookup)
                except (ValueError, TypeError) as error:
                    text = f"found {setting.value!r}: it, or a key that it depends on, has the wrong type ({error})"
                    text = text if isinstance(error, TypeError) else str(error)
                    self.problems.append(Problem(key, text, setting.location))
                    continue
                for meant, value in values.items():
                    changed = meant != key or value != setting.value
                    if changed and not meant.startswith(f"{key}."):  # placement=auto needs no translation
                        self.notes.append(f"{key}: {setting.value} ({setting.location}) sets {meant}: {value}")
                    settings.append((meant, setting.with_value(value)))
        return self._agreed(settings)

    # ------------------------------------------------------------------------------------------------ interpolations

    def _resolver(self, layers: list[Named]) -> Callable[[Setting], Setting | None]:
        """A function that resolves references to any key, by its name or an alias, or to its default. It returns None,
        and adds a problem, if a reference cannot be resolved."""
        ignored = list(self._ignored.items())
        if not any(has_interpolation(setting.value) for layer in [ignored, *layers] for _, setting in layer):
            return lambda setting: setting
        nulls = [key for layer in self.layers for key, setting in layer.items() if setting.value is None]
        values = dict.fromkeys(nulls)
        for key, field in fields_of(self.schema).items():
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            values[key] = field.default_from or default
        for layer in [ignored, *layers]:
            layer = [(key, setting) for key, setting in layer if setting.value != REMOVED]
            values |= {key: setting.value for key, setting in layer}
            values |= {
                setting.key: setting.value for _, setting in layer if setting.key not in sections_of(self.schema)
            }
        config = OmegaConf.create(unflatten(values))

        def resolve(setting: Setting) -> Setting | None:
            if not has_interpolation(setting.value):
                return setting
            try:
                value = OmegaConf.select(config, setting.key)
            except OmegaConfBaseException as error:
                reason = f"{str(error).splitlines()[0]}{self._nearest_reference(setting)}"
                message = f"{setting.value} cannot be resolved: {reason}"
                self.problems.append(Problem(setting.key, message, setting.location))
                return None
            value = OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            remember_expression(self.schema.aliases.resolve(setting.key), value, setting.value)
            return setting.with_value(value)

        return resolve

    def _nearest_reference(self, setting: Setting) -> str:
        """The key that an unresolvable reference was probably meant for."""
        references = re.findall(r"\$\{([\w.]+)\}", str(setting.value))
        known = fields_of(self.schema)
        near = [nearest_key(key, known) for key in references if key not in known]
        return f"; did you mean {near[0]}?" if near and near[0] else ""

    # ----------------------------------------------------------------------------------------- keys without a field

    def _in_schema(self, key: str, setting: Setting) -> bool:
        """Whether the schema has this key. Otherwise it is a key of public verl, whose value is checked."""
        if self._field_of(key):
            return True
        values = flatten({key: setting.value}) if isinstance(setting.value, Mapping) else {key: setting.value}
        for name, value in values.items():
            known = upstream_key(name, self.schema.upstream)
            if not known.accepts(value):
                accepted = ", ".join(map(format_value, known.accepted))
                message = f"{format_value(value)} is not supported: {known.instead} (accepted: {accepted})"
                self.problems.append(Problem(setting.key if name == key else name, message, setting.location))
        return False

    def _field_of(self, key: str) -> ConfigField | None:
        """The field that holds a key: its own, or a free mapping above it."""
        known = fields_of(self.schema)
        if key in known:
            return known[key]
        names = key.split(".")
        above = (known.get(".".join(names[:depth])) for depth in range(1, len(names)))
        return next((field for field in above if field and field.is_mapping), None)

    def _unknown(self, key: str, setting: Setting) -> str:
        known, names = fields_of(self.schema), key.split(".")
        for depth in range(1, len(names)):
            value_key = ".".join(names[:depth])
            if value_key in known:
                return f"unknown key: {value_key} is a value ({known[value_key].expected()}), not a section"
        if key in sections_of(self.schema):
            keys = ", ".join(self._names_below(key))
            return f"found {format_value(setting.value)}, expected a section with the keys {keys}"
        free_key, near = self._free_setting(key), self._nearest(key, setting)
        if meant := (self._misspelled(key) if setting.added else self._name_of_another(key)) or near:
            custom = f" (a parameter of a custom function of this name: {free_key})"
            return f"unknown key; did you mean {meant}?{custom if setting.added and free_key else ''}"
        if free_key:
            return f"unknown key; set a parameter of a custom function or class as {free_key}=... or +{key}=..."
        sections = dict.fromkeys(section for name in known for section in _sections_above(name))  # in schema order
        # leading sections are often omitted: optim.name for actor_rollout_ref.actor.optim.name
        full = [name for above in _sections_above(key) for name in sections if f".{name}".endswith(f".{above}")]
        section = full[0] if full else ""
        scope = f"keys of {section}" if section else "top-level keys"
        return f"unknown key ({scope}: {', '.join(self._names_below(section))})"

    def _names_below(self, section: str) -> list[str]:
        """The fields and sections of a section ("": the top level), in schema order."""
        start = f"{section}." if section else ""
        return list(
            dict.fromkeys(key[len(start) :].split(".")[0] for key in fields_of(self.schema) if key.startswith(start))
        )

    def _as_declared(self, key: str, setting: Setting) -> Setting:
        """A string field takes the value as written, not as YAML reads it (012 is not a number there).

        Where no string may stand, a list that a script quotes twice ("['model']") is one, and Python's None is null.
        """
        field, value = fields_of(self.schema).get(key), setting.value
        if field and field.is_string and isinstance(value, bool | int | float) and setting.text is not None:
            return setting.with_value(setting.text)
        if not field or field.takes_string or not isinstance(value, str):
            return setting
        return setting.with_value(None if value == "None" else yaml.safe_load(value) if value[:1] == "[" else value)


def ignored_notes(ignored: Layer, schema: str | None) -> list[str]:
    """Return notes that list the keys without effect whose value is not public verl's default, by the reason.

    Most reasons, such as "speed or memory only", go without saying and share one note. More than three keys of one
    section are listed as the section and their number, and so are all `_target_` keys.
    """
    names: dict[str, dict[str, list[str]]] = {}
    for key, setting in ignored.items():
        entry = ignored_key(key, schema, has_field=False)
        if setting.value != REMOVED and not (entry and entry.is_default(setting.value)):
            section, _, name = key.rpartition(".")
            reason = f": {entry.instead}" if entry and entry.tells_reason else "" if entry else ": not known, and off"
            names.setdefault(reason, {}).setdefault("_target_" if name == "_target_" else section, []).append(
                setting.key
            )
    notes = []
    for reason, sections in names.items():
        listed: list[str] = []
        for section, keys in sections.items():
            several = section == "_target_" or (section and len(keys) > 3)
            below = "" if section == "_target_" else ".*"
            listed += [f"{section}{below} ({len(keys)} keys)"] if several else keys
        count = sum(map(len, sections.values()))
        notes.append(f"ignored: {count} key{'s' * (count > 1)} without effect here: {', '.join(listed)}{reason}")
    return notes


def _reference(value: Any) -> str | None:
    """The key that a value refers to: `${key}` or `${oc.select:key,default}`."""
    match = re.fullmatch(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,(?:[^{}]|\{\})*)?\}", str(value))
    return match and match[1]


def _sections_above(key: str) -> list[str]:
    """The sections that hold a key, the innermost first."""
    names = key.split(".")[:-1]
    return [".".join(names[:depth]) for depth in range(len(names), 0, -1)]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]
