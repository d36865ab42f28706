"""The reference table of all keys, for the documentation."""

import yaml

from verl.config.fields import Tree, leaves
from verl.config.schema.ppo import Config


def reference_table(tree: type[Tree] = Config) -> str:
    """Every key of a tree as a Markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, leaf in leaves(tree).items():
        default = leaf.follows or yaml.safe_dump(leaf.default, default_flow_style=True).replace("\n...", "").strip()
        rows.append(f"| `{key}` | {leaf.expected()} | `{default}` | {leaf.meaning.replace('|', '/')} |")
    return "\n".join(rows) + "\n"
