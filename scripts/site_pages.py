"""A hook of mkdocs: the texts of the repository as pages of one site, with links that lead from page to page.

mkdocs.yml names it. README.md is the first page; docs/index.md, which lists all pages, is `all_pages.md`. A source file
that a page links becomes a page with its text. A link to a folder, or to a file that is not text, becomes plain words.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RENAMED = {
    "README.md": "index.md",
    "docs/index.md": "all_pages.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository, and their names on the site; others in docs/ keep theirs."""
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", "": "text"}
LINK = re.compile(r"\[(?P<text>[^]\n]*)\]\((?P<target>[^)\s]+)\)")
LIST_ITEM = re.compile(r"(?:[-*]|\d+\.) ")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    texts = {name: (ROOT / file).read_text(encoding="utf-8") for file, name in RENAMED.items()}
    pages = [*RENAMED, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    linked = {target for page in pages for target in _linked_sources(page)}
    texts |= {source_page(file): _page_of(file) for file in sorted(linked)}
    for name, text in texts.items():
        if old := files.get_file_from_path(name):
            files.remove(old)
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the text of `page` for Python-Markdown, with its links as they are on the site."""
    name = page.file.src_uri
    if name.startswith("source/"):
        return markdown
    file = next((file for file, renamed in RENAMED.items() if renamed == name), f"docs/{name}")
    return "".join(
        part if is_code else _spaced(LINK.sub(lambda match: _linked(match, file, name), part))
        for is_code, part in _parts(markdown)
    )


def source_page(file: str) -> str:
    """Return the name of the page that has the text of `file`."""
    return f"source/{file}.md"


def _linked_sources(page: str) -> set[str]:
    targets = LINK.finditer((ROOT / page).read_text(encoding="utf-8")) if (ROOT / page).exists() else ()
    files = {_file(match["target"], page) for match in targets}
    return {file for file in files if file and _is_source(file)}


def _is_source(file: str) -> bool:
    return (ROOT / file).is_file() and PurePosixPath(file).suffix in LANGUAGES


def _page_of(file: str) -> str:
    code = (ROOT / file).read_text(encoding="utf-8").rstrip()
    language = LANGUAGES[PurePosixPath(file).suffix]
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {file}\n\n~~~~~{language}\n{code}\n~~~~~\n"


def _file(target: str, page: str) -> str | None:
    """Return the file of the repository that `target`, a link on `page`, names; None if it names none."""
    path = target.partition("#")[0]
    if "://" in target or not path:
        return None
    return os.path.normpath(PurePosixPath(page).parent / path)


def _linked(match: re.Match[str], file: str, name: str) -> str:
    """Return the link that `match` found in `file` as it is on the site's page `name`."""
    linked = _file(match["target"], file)
    if linked is None:
        return match[0]
    if _is_source(linked):
        on_site = source_page(linked)
    elif linked in RENAMED or (linked.startswith("docs/") and (ROOT / linked).is_file()):
        on_site = RENAMED.get(linked, linked.removeprefix("docs/"))
    else:
        return match["text"]
    anchor = match["target"].partition("#")[1:]
    relative = PurePosixPath(os.path.relpath(on_site, PurePosixPath(name).parent)).as_posix()
    return f"[{match['text']}]({relative}{''.join(anchor)})"


def _parts(markdown: str) -> list[tuple[bool, str]]:
    """Return the text in parts, each with whether it is a fenced block of code."""
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return [(bool(number % 2), part) for number, part in enumerate(parts)]


def _spaced(text: str) -> str:
    """Return `text` with its lists as Python-Markdown reads them.

    An empty line comes before each list, and what is in an item is indented by four columns, not as far as its text.
    """
    lines: list[str] = []
    width = 0  # of the mark of the item that the line is in, such as "- "
    for line in text.split("\n"):
        if mark := LIST_ITEM.match(line):
            if lines and lines[-1] and not width:
                lines.append("")
            width = len(mark[0])
        elif line and not line.startswith(" " * max(1, width)):
            width = 0 if not lines or not lines[-1] else width
        elif line and width:
            line = " " * (4 - width) + line
        lines.append(line)
    return "\n".join(lines)
