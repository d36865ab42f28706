"""What every part of the configuration tree is made of: a strict pydantic model, and `key` for one documented field."""

import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from verl.config.aliases import Dialect
from verl.config.known_keys import Known

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def key(default: Any, meaning: str, *, follows: str | None = None, **limits: Any) -> Any:
    """One leaf of the tree: its default, one line of meaning, and its limits (`gt`, `ge`, `lt`, `le`).

    `follows` is an interpolation ("${data.seed}"): what the key is when nobody gives it, or gives it as null. The
    default stands in for it only in a part of the tree that is built alone.
    """
    extra = {"follows": follows} if follows else None
    return Field(default=default, description=meaning, json_schema_extra=extra, **limits)


def part(kind: "type[Node]", meaning: str) -> Any:
    """One branch of the tree."""
    return Field(default_factory=kind, description=meaning)


def one_or_many(value: Any) -> Any:
    """One text where a list is expected is a list of one."""
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(one_or_many)]
"""A list of text; one text alone is a list of one."""

FilePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""The path of a file or folder, or an id of a hub; ~ is the home directory."""

FilePaths = Annotated[list[FilePath], BeforeValidator(one_or_many)]
"""Some of them; one alone is a list of one."""


class Node(BaseModel):
    """A part of the tree: unknown keys are refused, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes True for 1; in a configuration that is a slip of the hand."""
        if isinstance(value, bool) and not _takes_bool(cls.model_fields[info.field_name].annotation):
            raise ValueError("true and false are not numbers")
        return value


class Tree(Node):
    """The root of a configuration: fills the keys that follow others.

    dialect: the second names of its keys. known: the keys of verl that it does not have.
    """

    dialect: ClassVar[Dialect] = Dialect()
    known: ClassVar[Mapping[str, Known]] = {}

    @model_validator(mode="before")
    @classmethod
    def _fill_followers(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        flat = cls.settle({k: v for k, v in flatten(data, cls).items() if v is not None or k not in followers(cls)})
        known = leaves(cls)

        def value_of(dotted: str) -> Any:
            if dotted in flat:
                return flat[dotted]
            leaf = known[dotted]
            return fill(leaf.follows) if leaf.follows else leaf.default

        def fill(reference: str) -> Any:
            whole = _REFERENCE.fullmatch(reference)
            return value_of(whole[1]) if whole else _REFERENCE.sub(lambda m: str(value_of(m[1])), reference)

        filled = {dotted: fill(reference) for dotted, reference in followers(cls).items() if dotted not in flat}
        return unflatten(flat | filled)

    @classmethod
    def settle(cls, given: dict[str, Any]) -> dict[str, Any]:
        """A root's own rule for a default that hangs on other keys: adds to what was given, by dotted key."""
        return given


@dataclass(frozen=True)
class Leaf:
    """One key of a tree: how it is typed, what it is by default and what it means."""

    annotation: Any
    field: FieldInfo
    follows: str | None

    @property
    def default(self) -> Any:
        return self.field.get_default(call_default_factory=True)

    @property
    def meaning(self) -> str:
        return self.field.description or ""

    @property
    def is_mapping(self) -> bool:
        """A free mapping (arguments handed on): any key below it is allowed."""
        return any(get_origin(kind) is dict for kind in _members(self.annotation))

    @property
    def is_text(self) -> bool:
        return all(kind is str or _is_word(kind) or kind is NoneType for kind in _members(self.annotation))

    def words(self) -> list[str]:
        """The words that are allowed here, where there is a choice of words."""
        kinds = [member for kind in _members(self.annotation) for member in (kind, *get_args(kind))]
        return [word for kind in kinds if _is_word(kind) for word in get_args(kind)]

    def expected(self) -> str:
        """What is allowed here, in words: 'a whole number >= 1', 'one of hf, native'."""
        limits = " and ".join(_limits(self.field.metadata))
        kinds = " or ".join(_in_words(kind) for kind in _members(self.annotation))
        if limits and " or null" in kinds:
            return kinds.replace(" or null", f" {limits} or null")
        return f"{kinds} {limits}".strip()


@functools.cache
def leaves(tree: type[Node]) -> dict[str, Leaf]:
    """Every key of a tree by its dotted name, in the order in which the tree is written."""
    return dict(_walk(tree, ""))


@functools.cache
def followers(tree: type[Node]) -> dict[str, str]:
    """The keys that follow others: dotted name -> interpolation."""
    return {dotted: leaf.follows for dotted, leaf in leaves(tree).items() if leaf.follows}


@functools.cache
def sections(tree: type[Node]) -> set[str]:
    """The dotted names of the branches."""
    parts = [dotted.split(".") for dotted in leaves(tree)]
    return {".".join(names[:depth]) for names in parts for depth in range(1, len(names))}


def _walk(tree: type[Node], prefix: str) -> Iterator[tuple[str, Leaf]]:
    for name, field in tree.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Node):
            yield from _walk(kind, f"{prefix}{name}.")
        else:
            extra = field.json_schema_extra or {}
            yield prefix + name, Leaf(kind, field, extra.get("follows"))


def flatten(data: Mapping[Any, Any], tree: type[Node] | None = None, prefix: str = "") -> dict[str, Any]:
    """Nested mappings -> dotted keys. A free mapping of `tree` stays whole; without a tree every mapping is opened.

    An empty section ("data:" with nothing below, which YAML reads as null) says nothing, so it is left out.
    """
    known = leaves(tree) if tree else {}
    flat: dict[str, Any] = {}
    for name, value in data.items():
        dotted = f"{prefix}{name}"
        if isinstance(value, Node):
            value = value.model_dump(exclude_unset=True)
        leaf = known.get(dotted)
        if value is None and tree and leaf is None and dotted in sections(tree):
            continue
        if isinstance(value, Mapping) and value and not (leaf and leaf.is_mapping):
            flat |= flatten(value, tree, f"{dotted}.")
        elif not (isinstance(value, Mapping) and tree and dotted in sections(tree)):
            flat[dotted] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys -> nested dictionaries. Raises ValueError when a key is both a value and a section."""
    nested: dict[str, Any] = {}
    for dotted, value in flat.items():
        *path, last = dotted.split(".")
        here = nested
        for name in path:
            if here.get(name) is None:
                here[name] = {}
            here = here[name]
            if not isinstance(here, dict):
                raise ValueError(f"{dotted}: a key above it has a value already ({here!r})")
        if isinstance(value, Mapping):
            below = here.get(last)
            here[last] = {**below, **value} if isinstance(below, dict) else dict(value)
        else:
            here[last] = value
    return nested


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type: `int | None` -> (int, NoneType)."""
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(member for option in get_args(annotation) for member in _members(option))
    return (annotation,)


def _is_word(kind: Any) -> bool:
    return get_origin(kind) is Literal and all(isinstance(word, str) for word in get_args(kind))


def _takes_bool(annotation: Any) -> bool:
    return any(kind in (bool, Any) or get_origin(kind) is dict for kind in _members(annotation))


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
    Any: "anything",
}


def _in_words(kind: Any) -> str:
    if kind in _WORDS:
        return _WORDS[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is list:
        return f"a list of {' or '.join(map(_in_words, _members(arguments[0])))}"
    if origin is tuple:
        return f"a list of {len(arguments)} numbers"
    if origin is dict:
        return "a mapping"
    raise TypeError(f"no words for the type {kind!r} of a configuration key")


def _limits(metadata: list[Any]) -> list[str]:
    """The limits of a field in words; pydantic keeps one object of annotated_types for each."""
    found = []
    for limit in metadata:
        match limit:
            case Gt():
                found.append(f"> {limit.gt}")
            case Ge():
                found.append(f">= {limit.ge}")
            case Lt():
                found.append(f"< {limit.lt}")
            case Le():
                found.append(f"<= {limit.le}")
    return found
