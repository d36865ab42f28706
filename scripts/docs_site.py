"""Hooks of mkdocs.yml. The pages are read in a repository browser too, and need these edits for the site:

- the home page is README.md;
- `<!-- api verl.module.Name -->` becomes the documentation of that object, from its docstrings; names of methods after
  it select these methods, inherited ones included;
- long keys in tables may break;
- a code block of the language mermaid is a diagram;
- a link to a file that is not a page leads to the repository (`repo_url`), or is plain text.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).resolve().parents[1]
OBJECT = re.compile(r"^<!-- api (\S+)((?: \w+)*) -->$", re.MULTILINE)
CELL = re.compile(r"(?<=<td><code>)[^<]+(?=</code>)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    """Let the theme draw mermaid blocks."""
    fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add README.md as the home page."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Insert the objects, and rewrite the links to other files of the repository."""
    here = posixpath.dirname(page.file.src_uri)
    folder = "" if page.file.src_uri == "index.md" else posixpath.join("docs", here)

    def link(match: re.Match[str]) -> str:
        label, target = match[1], match[2]
        path = posixpath.normpath(posixpath.join(folder, target))
        is_page = files.get_file_from_path(posixpath.normpath(posixpath.join(here, target))) is not None
        if is_page or not (ROOT / path).exists():
            return match[0]
        return f"[{label}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else label

    return LINK.sub(link, OBJECT.sub(_directive, markdown))


def _directive(match: re.Match[str]) -> str:
    """The directive of mkdocstrings for an object."""
    path, methods = match[1], match[2].split()
    options = f"\n    options: {{inherited_members: true, members: [{', '.join(methods)}]}}" if methods else ""
    return f"::: {path}{options}"


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Let long keys in tables break after dots and underscores."""
    return CELL.sub(lambda found: re.sub(r"([._/])(?=\w)", r"\1<wbr>", found[0]), html)


def on_page_context(context: Any, page: Any, config: Any, nav: Any) -> Any:
    """List an object of the reference once in the table of contents: the page and mkdocstrings have a heading each."""
    for title in page.toc:
        following = [*title.children[1:], None]
        title.children = [
            item for item, after in zip(title.children, following) if after is None or item.title != after.title
        ]
    return context
