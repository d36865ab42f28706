"""The reference table of all fields, for `python -m verl.cli.config` and the documentation."""

import yaml

from verl.config.fields import Schema, fields_of
from verl.config.schema.ppo import Config


def reference_table(schema: type[Schema] = Config) -> str:
    """Every field of a schema as a Markdown table: key, type, default, meaning."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key, found in fields_of(schema).items():
        default = found.default_from or yaml.safe_dump(found.default, default_flow_style=True).replace("\n...", "")
        rows.append(f"| `{key}` | {found.expected()} | `{default.strip()}` | {found.help.replace('|', '/')} |")
    return "\n".join(rows) + "\n"
