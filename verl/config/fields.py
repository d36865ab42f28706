"""Building blocks of the configuration schema: `Section`, `Schema`, and `field` for one documented field."""

import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import pydantic
from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from verl.utils.paths import read_text

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


Condition = tuple[Any, ...]
"""(key, value): a setting has an effect if the key has this value, or, for a predicate, a value that satisfies it.

The key is in the section of the setting, or in the nearest section above it that has such a key. A third element is
appended to the message; it names an exception.
"""

ActiveWhen = Condition | tuple[Condition, ...] | list[Any] | None
"""When a setting has an effect: a condition, a tuple of which one must hold, a list of such of which all must hold."""

ALWAYS: list[Any] = []
"""`active_when` of a field that has an effect even if its section has none."""


def field(
    default: Any, help: str, *, default_from: str | None = None, active_when: ActiveWhen = None, **limits: Any
) -> Any:
    """Declare one field of a section.

    Args:
        default: the default value. With `default_from`: the default of a section that is built separately.
        help: one line of help, shown by `verl config explain`.
        default_from: an interpolation such as "${data.seed}", used if the field is not set or null.
        active_when: when the field has an effect. Setting it without effect is logged (`settings_without_effect`).
        limits: `gt`, `ge`, `lt`, `le`.
    """
    extra = {"default_from": default_from, "active_when": active_when}
    return pydantic.Field(default=default, description=help, json_schema_extra=extra, **limits)


def section(
    kind: "type[Section]", help: str, *, active_when: ActiveWhen = None, below: Mapping[str, ActiveWhen] | None = None
) -> Any:
    """Declare a nested section.

    Args:
        kind: the class of the section.
        help: one line of help.
        active_when: when the fields of the section have an effect. Keys are those of the section around it.
        below: the same for some fields, by dotted name in the section.
    """
    extra = {"active_when": active_when, "below": below or {}}
    return pydantic.Field(default_factory=kind, description=help, json_schema_extra=extra)


def like(declared: "type[Section]", name: str, default_from: str | None = None) -> Any:
    """Declare a field like one of another section. default_from: as in `field`; None: as declared there."""
    info = declared.model_fields[name]
    limits = {limit: getattr(item, limit) for item in info.metadata for limit in _SIGNS if hasattr(item, limit)}
    extra = info.json_schema_extra | ({"default_from": default_from} if default_from else {})
    return pydantic.Field(default=info.default, description=info.description, json_schema_extra=extra, **limits)


def is_set(value: Any) -> bool:
    """A condition of `active_when`: the value is not null."""
    return value is not None


def is_positive(value: float) -> bool:
    """A condition of `active_when`."""
    return value > 0


def other_than(value: Any) -> Callable[[Any], bool]:
    """A condition of `active_when`."""
    return lambda actual: actual != value


def never(value: Any) -> bool:
    """A condition of `active_when` that no value satisfies."""
    return False


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StrList = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of strings; a single string is a list of one."""

Precision = Literal["auto", "fp64", "float64", "fp32", "float32", "bf16", "bfloat16", "fp16", "float16"]
"""The name of a floating-point dtype."""

FilePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path of a file or folder, or a Hugging Face Hub id; `~` is expanded."""


def _read_template(value: str) -> str:
    path = os.path.expanduser(value)
    return read_text(path) if value.endswith(".jinja") and os.path.isfile(path) else value


Template = Annotated[str, AfterValidator(_read_template)]
"""The text of a Jinja template. The path of a file `*.jinja` is replaced by its content."""

FilePaths = Annotated[list[FilePath], BeforeValidator(lambda value: [] if value is None else _as_list(value))]
"""A list of paths; a single path is a list of one, null an empty list."""


class Section(pydantic.BaseModel):
    """A section of the configuration. Unknown fields are errors, and instances are frozen.

    It can also be read like a mapping (`config["seed"]`, `config.get("seed", 0)`), as custom datasets do.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _bool_is_not_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject True and False for numbers: Python accepts True as 1, but in a configuration it is a mistake."""
        if isinstance(value, bool):
            kinds = _members(cls.model_fields[info.field_name].annotation)
            if not any(kind in (bool, Any) or get_origin(kind) is dict for kind in kinds):
                raise ValueError("expected a number, found a bool")
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError(
            f"{type(self).__name__} is read-only: {name} cannot be set. Make a changed copy of the configuration with "
            f'config.with_overrides({{"...{name}": {value!r}}}), or of this section with '
            f"section.model_copy(update={{{name!r}: {value!r}}}); or pass overrides= to the trainer"
        )

    def __repr_args__(self) -> Iterator[tuple[str, Any]]:
        """The fields that differ from their defaults."""
        for name, value in vars(self).items():
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                yield name, value

    def keys(self) -> list[str]:
        return list(vars(self))

    def get(self, key: str, default: Any = None) -> Any:
        return vars(self).get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in vars(self)

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]


Lookup = Callable[[str], Any]
"""dotted key -> its value in the file and the overrides, otherwise its default."""


@dataclass(frozen=True)
class Aliases:
    """Other names of the fields of one schema (the tables are in aliases.py).

    Attributes:
        short: alias -> key. A name that ends in `.*` renames everything below it.
        deprecated: the same, with a warning that asks the user to rename.
        computed: alias -> function(value, lookup) that returns {key: value}, or raises ValueError for an invalid value.
    """

    short: Mapping[str, str] = dataclass_field(default_factory=dict)
    deprecated: Mapping[str, str] = dataclass_field(default_factory=dict)
    computed: Mapping[str, Callable[[Any, Lookup], dict[str, Any]]] = dataclass_field(default_factory=dict)

    def names(self) -> list[str]:
        """Every alias (of an alias that ends in `.*`: the section)."""
        return [name.removesuffix(".*") for name in (*self.short, *self.deprecated, *self.computed)]

    def resolve(self, key: str) -> str:
        """The key that `key` is an alias of; `key` itself if it is not an alias."""
        short = _renamed(key, self.short)
        return short if short != key else _renamed(key, self.deprecated)

    def is_deprecated(self, key: str) -> bool:
        return _renamed(key, self.short) == key and _renamed(key, self.deprecated) != key


def _renamed(key: str, table: Mapping[str, str]) -> str:
    if key in table:
        return _renamed(table[key], table)
    for end in (i for i in reversed(range(len(key))) if key[i] == "."):
        if (new := table.get(f"{key[:end]}.*")) is not None:
            return _renamed(new[:-1] + key[end + 1 :], table)
    return key


class Schema(Section):
    """The root of a configuration. Fills the fields that have a `default_from`.

    Attributes:
        aliases: other names of its fields.
        upstream: the section of upstream_keys.yaml that lists the keys of public verl that this schema does not have.
    """

    aliases: ClassVar[Aliases] = Aliases()
    upstream: ClassVar[str | None] = None

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        derived = derived_fields(cls)
        flat = cls.derive({k: v for k, v in flatten(data, cls).items() if v is not None or k not in derived})
        known = fields_of(cls)

        def value_of(key: str) -> Any:
            if key in flat:
                return flat[key]
            return fill(known[key].default_from) if known[key].default_from else known[key].default

        def fill(reference: str) -> Any:
            single = _REFERENCE.fullmatch(reference)
            return value_of(single[1]) if single else _REFERENCE.sub(lambda m: str(value_of(m[1])), reference)

        filled = {key: fill(reference) for key, reference in derived.items() if key not in flat}
        return unflatten(flat | filled)

    def with_overrides(self, overrides: Any) -> Self:
        """A copy with other values; this configuration is unchanged.

        >>> config.with_overrides({"actor_rollout_ref.actor.optim.lr": 1e-5})

        Args:
            overrides: a dictionary with nested or dotted keys, or a list of "key=value".

        Raises:
            ConfigError: unknown keys, and values of a wrong type.
        """
        return importlib.import_module("verl.config.load").with_overrides(self, overrides)

    @classmethod
    def derive(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """Override to compute defaults from several fields. Returns the settings (by dotted key) with additions."""
        return settings


@dataclass(frozen=True)
class ConfigField:
    """One field of a schema: its type, its default and its help.

    Attributes:
        default_from: the interpolation of its default.
        active_when: (dotted section, condition) pairs, of the field and its sections: when the field has an effect.
    """

    annotation: Any
    info: FieldInfo
    default_from: str | None
    active_when: tuple[tuple[str, ActiveWhen], ...] = ()

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def help(self) -> str:
        return self.info.description or ""

    @property
    def is_mapping(self) -> bool:
        """Whether the field is a free mapping (arguments that are passed through), in which every key is allowed."""
        return any(get_origin(kind) is dict for kind in _members(self.annotation))

    @property
    def section_of_entries(self) -> type[Section] | None:
        """The section that every entry of a mapping is; None for other fields."""
        kinds = [kind for member in _members(self.annotation) for kind in get_args(member)[1:]]
        return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)

    @property
    def is_string(self) -> bool:
        return all(kind is str or _is_choice(kind) or kind is NoneType for kind in _members(self.annotation))

    @property
    def takes_string(self) -> bool:
        return any(kind is str or kind is Any or _is_choice(kind) for kind in _members(self.annotation))

    def choices(self) -> list[str]:
        """The allowed strings, if the type is a `Literal` (or a list of one)."""
        kinds = [member for kind in _members(self.annotation) for member in (kind, *get_args(kind))]
        return [choice for kind in kinds if _is_choice(kind) for choice in get_args(kind)]

    def expected(self) -> str:
        """The type as shown to users: "int >= 1", "one of hf, native"."""
        members = [member for member in get_args(self.annotation) if get_origin(member) is Annotated]
        inner = [limit for member in members for limit in get_args(member)[1:]]
        inner = [item for limit in inner for item in (limit.metadata if isinstance(limit, FieldInfo) else [limit])]
        metadata = [*self.info.metadata, *inner]  # one object of annotated_types for each limit
        limits = [
            f"{_SIGNS[name]} {getattr(item, name)}" for item in metadata for name in _SIGNS if hasattr(item, name)
        ]
        first, *others = (_type_name(kind) for kind in _members(self.annotation))
        return " or ".join([f"{first} {' and '.join(limits)}".strip(), *others])


@functools.cache
def fields_of(schema: type[Section]) -> dict[str, ConfigField]:
    """Every field of a schema by its dotted key, in the order of declaration."""
    return dict(_walk(schema, ""))


@functools.cache
def derived_fields(schema: type[Section]) -> dict[str, str]:
    """The fields that take their default from another field: dotted key -> interpolation."""
    return {key: field.default_from for key, field in fields_of(schema).items() if field.default_from}


@functools.cache
def sections_of(schema: type[Section]) -> set[str]:
    """The dotted names of the sections."""
    names = [key.split(".") for key in fields_of(schema)]
    return {".".join(parts[:depth]) for parts in names for depth in range(1, len(parts))}


@functools.cache
def plain_defaults(schema: type[Section]) -> Mapping[str, Any]:
    """The default of every field by its dotted key, without those that are computed from other fields."""
    return {key: field.default for key, field in fields_of(schema).items()}


def _walk(schema: type[Section], prefix: str) -> Iterator[tuple[str, ConfigField]]:
    for name, info in schema.model_fields.items():
        kind, extra, key = info.annotation, info.json_schema_extra or {}, prefix + name
        conditions = ((prefix, extra["active_when"]),) if extra.get("active_when") is not None else ()
        if isinstance(kind, type) and issubclass(kind, Section):
            below = {f"{key}.{inner}": ((prefix, when),) for inner, when in extra.get("below", {}).items()}
            for inner, field in _walk(kind, f"{key}."):
                if all(when != ALWAYS for _, when in field.active_when):
                    field = replace(field, active_when=conditions + below.get(inner, ()) + field.active_when)
                yield inner, field
        else:
            yield key, ConfigField(kind, info, extra.get("default_from"), conditions)


def flatten(data: Mapping[Any, Any], schema: type[Section] | None = None, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted keys. A free mapping of `schema` stays one value; without a schema every mapping is
    flattened. An empty section ("data:" with nothing below it, which YAML reads as null) is dropped."""
    flat: dict[str, Any] = {}
    _flatten_into(flat, data, fields_of(schema) if schema else {}, sections_of(schema) if schema else set(), prefix)
    return flat


_PLAIN = frozenset({bool, int, float, str, list, NoneType})
"""Types of values that are neither a section nor a mapping."""


def _flatten_into(
    flat: dict[str, Any], data: Mapping[Any, Any], known: Mapping[str, ConfigField], sections: Set[str], prefix: str
) -> None:
    for name, value in data.items():
        key = f"{prefix}{name}"
        if type(value) in _PLAIN:  # most values: the checks of abstract classes below take long
            if value is not None or key not in sections:
                flat[key] = value
            continue
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if not isinstance(value, (dict, Mapping)):
            flat[key] = value
        elif value and not (key in known and known[key].is_mapping):
            _flatten_into(flat, value, known, sections, f"{key}.")
        elif key not in sections:
            flat[key] = value


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> nested dictionaries. Raises ValueError if a key is both a value and a section."""
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        section = nested
        for name in path:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
            if not isinstance(section, dict):
                raise ValueError(f"{key}: a key above it already has a value ({section!r})")
        if isinstance(value, Mapping):
            below = section.get(last)
            section[last] = {**below, **value} if isinstance(below, dict) else dict(value)
        else:
            section[last] = value
    return nested


def to_flat_dict(config: Schema) -> dict[str, Any]:
    """Dotted key -> value of every field."""
    return flatten(config.model_dump(mode="json"), type(config))


@functools.cache
def _flat_defaults(schema: type[Schema]) -> Mapping[str, Any]:
    """Dotted key -> value of every field without any setting. Not to be changed."""
    return to_flat_dict(schema())


def differences(config: Schema) -> dict[str, Any]:
    """Dotted key -> value of the fields that differ from their defaults, derived defaults included."""
    flat = to_flat_dict(config)
    return {key: flat[key] for key in _changed_fields(type(config), json.dumps(flat))}


@functools.lru_cache(maxsize=4)  # a start asks several times for those of one configuration
def _changed_fields(schema: type[Schema], text: str) -> list[str]:
    """Dotted keys of `differences`, of a flat configuration as JSON. Not to be changed."""
    flat, plain, derived = json.loads(text), _flat_defaults(schema), derived_fields(schema)
    changed = {key: value for key, value in flat.items() if key not in derived and value != plain[key]}
    implied = to_flat_dict(schema.model_validate(unflatten(changed)))
    for key in derived:
        if implied[key] != flat[key]:
            changed[key] = flat[key]
            implied = to_flat_dict(schema.model_validate(unflatten(changed)))
    return [key for key in flat if key in changed]


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: `int | None` -> (int, NoneType)."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for option in get_args(annotation) for member in _members(option))
    return (annotation,)


def _is_choice(kind: Any) -> bool:
    return get_origin(kind) is Literal and all(isinstance(choice, str) for choice in get_args(kind))


_TYPE_NAMES: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "str", NoneType: "null", Any: "any"}


def _type_name(kind: Any) -> str:
    if kind in _TYPE_NAMES:
        return _TYPE_NAMES[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"list[{' or '.join(map(_type_name, _members(arguments[0])))}]"
    if origin is tuple:
        return f"list[{_type_name(arguments[0])}] of length {len(arguments)}"
    if origin is dict:
        return "dict"
    raise TypeError(f"a configuration field cannot have the type {kind!r}")
