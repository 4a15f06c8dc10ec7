"""The site of the documentation has every page, and shows it as it is read in the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown_it import MarkdownIt

from scripts.site_pages import RENAMED, on_page_markdown

ROOT = Path(__file__).parents[2]
MKDOCS = next(
    (
        str(path)
        for path in (Path(sys.prefix) / "bin" / "mkdocs", ROOT / ".venv-docs" / "bin" / "mkdocs")
        if path.exists()
    ),
    shutil.which("mkdocs"),
)
COUNTED = ("h1", "h2", "h3", "h4", "ul", "ol", "li", "table", "tr", "td", "pre", "code", "img")

ELSEWHERE = re.compile(r"<(?:script|img|iframe)[^>]* src=\W?http|<link[^>]*stylesheet[^>]*http")
"""What makes a browser ask another server."""


def test_the_menu_has_every_page_once() -> None:
    _, _, menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    named = re.findall(r"([\w/]+\.md)$", menu, re.MULTILINE)
    pages = [f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")] + [*RENAMED]
    expected = {RENAMED.get(page, page.removeprefix("docs/")) for page in pages}
    assert sorted(named) == sorted(expected), "give each page of docs/ its place in the nav of mkdocs.yml"


def test_the_script_installs_what_the_extra_names() -> None:
    (wanted,) = re.findall(r'^MATERIAL="(.*?)"', (ROOT / "scripts" / "build_docs.sh").read_text(), re.MULTILINE)
    assert f'docs = ["{wanted}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("page", "link", "on_site"),
    [
        ("index.md", "[a](docs/quickstart.md#watch)", "[a](quickstart.md#watch)"),
        ("index.md", "[a](docs/index.md)", "[a](all_pages.md)"),
        ("index.md", "![a](docs/images/run.svg)", "![a](images/run.svg)"),
        ("index.md", "[a](LICENSE)", "[a](source/LICENSE.md)"),
        ("index.md", "[a](#on-disk)", "[a](#on-disk)"),
        ("all_pages.md", "[a](../README.md)", "[a](index.md)"),
        ("watching.md", "[a](https://ui.perfetto.dev)", "[a](https://ui.perfetto.dev)"),
        ("watching.md", "[a](../tests/docs/test_site.py)", "[a](source/tests/docs/test_site.py.md)"),
        ("watching.md", "[a](../tests/docs)", "a"),
        ("contributing.md", "[a](docs/proof.md)", "[a](proof.md)"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(page: str, link: str, on_site: str) -> None:
    code = "\n```\n[a](docs/quickstart.md)\n```\n"
    assert on_page_markdown(f"See {link}.{code}", page=_page(page)) == f"See {on_site}.{code}"


def test_lists_are_written_as_python_markdown_reads_them() -> None:
    ours = "Two:\n- one\n  more\n\n      code\n- two\n\n1. first\n   of all\n\n    a paragraph\n- no list"
    assert on_page_markdown(ours, page=_page("watching.md")).split("\n") == [
        *("Two:", "", "- one", "    more", "", "        code", "- two", ""),
        *("1. first", "    of all", "", "     a paragraph", "- no list"),
    ]


@pytest.mark.slow  # builds the complete site
@pytest.mark.skipif(MKDOCS is None, reason="needs mkdocs: scripts/build_docs.sh installs it")
def test_the_site_builds_without_a_warning_and_shows_every_page_as_github_does(tmp_path: Path) -> None:
    assert MKDOCS is not None
    command = [MKDOCS, "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    markdown = MarkdownIt("commonmark").enable("table")
    for page in {*RENAMED, *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}:
        name = RENAMED.get(page, page.removeprefix("docs/")).replace(".md", ".html")
        shown = _Elements("article").of((tmp_path / name).read_text(encoding="utf-8"))
        expected = _Elements("").of(markdown.render((ROOT / page).read_text(encoding="utf-8")))
        assert shown == expected, page
    for path in tmp_path.rglob("*.html"):
        assert not ELSEWHERE.search(path.read_text(encoding="utf-8")), path


def _page(name: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=name))


class _Elements(HTMLParser):
    """Counts the elements inside of the element `inside`, or all of them."""

    def __init__(self, inside: str) -> None:
        super().__init__()
        self._inside, self._counts = inside, Counter[str]()
        self._is_in = not inside

    def of(self, html: str) -> Counter[str]:
        self.feed(html)
        return self._counts

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_in |= tag == self._inside
        if self._is_in and tag in COUNTED:
            self._counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self._is_in &= tag != self._inside or not self._inside
