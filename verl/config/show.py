"""A configuration as text: YAML that can be loaded again, dotted keys, and the reference table of all keys."""

from typing import Any

import yaml

from verl.config.node import Tree, flatten, followers, leaves, unflatten
from verl.config.tree import Config


def to_flat_dict(config: Tree) -> dict[str, Any]:
    """Dotted key -> value of everything, for trackers and for comparing two runs."""
    return flatten(config.model_dump(mode="json"), type(config))


def differences(config: Tree) -> dict[str, Any]:
    """Dotted key -> value of what differs from the defaults; what merely follows another key is not listed."""
    tree = type(config)
    flat, plain = to_flat_dict(config), to_flat_dict(tree())
    chosen = {key: value for key, value in flat.items() if key not in followers(tree) and value != plain[key]}
    for key in followers(tree):
        implied = to_flat_dict(tree.model_validate(unflatten(chosen)))
        if implied[key] != flat[key]:
            chosen[key] = flat[key]
    return {key: chosen[key] for key in flat if key in chosen}


def dump_config(config: Tree, *, everything: bool = False) -> str:
    """YAML that loads to the same configuration: only what differs from the defaults, or all of it."""
    chosen = to_flat_dict(config) if everything else differences(config)
    return yaml.safe_dump(unflatten(chosen), sort_keys=False, allow_unicode=True)


def reference(tree: type[Tree] = Config) -> str:
    """Every key of a tree as a Markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, leaf in leaves(tree).items():
        default = leaf.follows or yaml.safe_dump(leaf.default, default_flow_style=True).replace("\n...", "").strip()
        rows.append(f"| `{key}` | {leaf.expected()} | `{default}` | {leaf.meaning.replace('|', '/')} |")
    return "\n".join(rows) + "\n"
