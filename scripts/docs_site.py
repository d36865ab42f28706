"""Hooks of mkdocs.yml. The pages are read in a repository browser too, and need these edits for the site:

- the home pages are README.md and README.zh.md;
- a `<picture>` follows the colors of the site;
- `<!-- api verl.module.Name -->` becomes the documentation of that object, from its docstrings; names of methods after
  it select these methods, inherited ones included;
- the search lists pages of the guide first, and internals last;
- long keys in tables may break;
- a code block of the language mermaid is a diagram;
- a file of the repository that a page links becomes a page of the site below `source/`, with its images; a link to a
  folder or a large file is plain text.
"""

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel
from pymdownx.superfences import fence_code_format

ROOT = Path(__file__).resolve().parents[1]
OBJECT = re.compile(r"^<!-- api (\S+)((?: \w+)*) -->$", re.MULTILINE)
CELL = re.compile(r"(?<=<td><code>)[^<]+(?=</code>)")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r'(?:!\[[^\]]*\]\(|src="|srcset=")([^)#\s"]+)')
PICTURE = re.compile(
    r'<picture>\s*<source[^>]*srcset="(?:docs/)?([^"]+)">\s*'
    r'<img src="(?:docs/)?([^"]+)" alt="([^"]*)"[^>]*>\s*</picture>'
)
HOME = {"README.md": "index.md", "README.zh.md": "index.zh.md"}
SOURCE = "source"
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".txt": "text"}
#: part of the navigation -> weight of its pages in the search
BOOST = {"Guide": 3, "Internals": 0.5}
#: bytes of a file that becomes a page
LARGEST = 60_000


def on_config(config: Any) -> Any:
    """Let the theme draw mermaid blocks."""
    fence = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs["pymdownx.superfences"] = {"custom_fences": [fence]}
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the home pages, and the files of the repository that the pages link."""
    for name, page in HOME.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=text))
    pending = [file for file in files if file.is_documentation_page()]
    while pending:
        file = pending.pop()
        for target in IMAGE.findall(file.content_string) if file.src_uri.startswith(f"{SOURCE}/") else ():
            path = _linked_path(file.src_uri, target)
            if (ROOT / path).is_file() and files.get_file_from_path(f"{SOURCE}/{path}") is None:
                files.append(File.generated(config, f"{SOURCE}/{path}", abs_src_path=str(ROOT / path)))
        for _, target, _ in LINK.findall(file.content_string):
            path = _linked_path(file.src_uri, target)
            page = _page(path)
            if page.startswith(f"{SOURCE}/") and files.get_file_from_path(page) is None and _is_shown(path):
                level = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, page, content=_source_page(path), inclusion=level))
                pending.append(files.get_file_from_path(page))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Insert the objects, and rewrite the links to other files of the repository."""
    page.meta.setdefault("search", {"boost": BOOST.get(page.ancestors[-1].title, 1)} if page.ancestors else {})
    start = posixpath.dirname(page.file.src_uri) or "."

    def link(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = _linked_path(page.file.src_uri, target)
        if "://" in target or not (ROOT / path).exists():
            return match[0]
        if files.get_file_from_path(_page(path)) is None:
            return label
        return f"[{label}]({posixpath.relpath(_page(path), start)}{anchor})"

    return LINK.sub(link, OBJECT.sub(_directive, PICTURE.sub(_images, markdown)))


def _page(path: str) -> str:
    """The page of the site for a file of the repository."""
    if path in HOME:
        return HOME[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return posixpath.join(SOURCE, path if path.endswith(".md") else f"{path}.md")


def _linked_path(page: str, target: str) -> str:
    """The file of the repository that a relative link of a page leads to; without symbolic links."""
    path = (ROOT / _repository_path(page)).parent.joinpath(target).resolve()
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target


def _repository_path(page: str) -> str:
    """The file of the repository whose links a page has."""
    home = next((name for name, uri in HOME.items() if uri == page), None)
    return home or (page.removeprefix(f"{SOURCE}/") if page.startswith(f"{SOURCE}/") else f"docs/{page}")


def _is_shown(path: str) -> bool:
    file = ROOT / path
    known = file.suffix in {".md", ".ipynb", *LANGUAGES} or file.name == "Dockerfile"
    return file.is_file() and known and file.stat().st_size <= LARGEST


def _source_page(path: str) -> str:
    """A file of the repository as a page that the search leaves out."""
    text = (ROOT / path).read_text(encoding="utf-8")
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    if path.endswith(".md"):
        return head + text
    if path.endswith(".ipynb"):
        cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
        return head + "\n\n".join(source if kind == "markdown" else _fence(source, "python") for source, kind in cells)
    return f"{head}# {path}\n\n{_fence(text, LANGUAGES.get(Path(path).suffix, 'text'))}"


def _fence(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"


def _images(picture: re.Match[str]) -> str:
    """One image for each color scheme of the theme."""
    dark, light, text = picture.groups()
    return f"![{text}]({light}#only-light)\n![{text}]({dark}#only-dark)"


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
