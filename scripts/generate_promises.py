"""Write the list of promises in docs/commit_protocol.md from the marks of the tests that hold them.

    python scripts/generate_promises.py

A mark is `@pytest.mark.promise("One sentence.", section="crash")`; several tests may hold one promise. The marks are
read from the syntax of the tests: none of them is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "commit_protocol.md"
BEGIN, END = "<!-- promises: written by scripts/generate_promises.py -->\n\n", "\n<!-- end of promises -->"
SECTIONS = {
    "crash": "What is there after a crash",
    "state": "What is saved",
    "failure": "When a save fails",
    "kept": "What is kept",
    "loaded": "What is loaded",
    "hostile": "What a hostile checkpoint can do",
    "writer": "Who writes",
    "bucket": "In an object store",
}
"""The headings, in their order on the page, by the section of a mark."""
FIRST = "tests/store/"
"""Its promises begin a section: those of complete runs follow from them."""


class Held(NamedTuple):
    """A mark: test `name` in `file` holds `promise`."""

    section: str
    promise: str
    file: str
    name: str


def marks() -> list[Held]:
    """Return the marks of all tests, by section, file and line."""
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    ordered = sorted(files, key=lambda file: (not file.startswith(FIRST), file))
    found = [held for file in ordered for held in _marks_in(file)]
    return sorted(found, key=lambda held: [*SECTIONS].index(held.section))


def render(page: str) -> str:
    """Return `page` with a new list between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    return before + BEGIN + "\n".join(_lines()) + "\n" + END + after


def _lines() -> Iterator[str]:
    tests: dict[str, dict[str, list[Held]]] = {section: {} for section in SECTIONS}
    for held in marks():
        tests[held.section].setdefault(held.promise, []).append(held)
    for section, promises in tests.items():
        yield from ([""] if section != next(iter(SECTIONS)) else [])
        yield from (f"### {SECTIONS[section]}", "")
        for promise, holding in promises.items():
            links = ",\n  ".join(f"[{held.name}](../{held.file})" for held in holding)
            yield f"- {promise}\n  {links}"


def _marks_in(file: str) -> Iterator[Held]:
    text = (ROOT / file).read_text(encoding="utf-8")
    if "mark.promise(" not in text:
        return
    for function in ast.parse(text).body:
        if isinstance(function, ast.FunctionDef):
            for mark in function.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    (promise,), (section,) = mark.args, mark.keywords
                    yield Held(ast.literal_eval(section.value), ast.literal_eval(promise), file, function.name)


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
