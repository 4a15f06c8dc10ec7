"""Write the tables of docs/proof.md from the points, kinds and conditions of torchtitan_lite/faults.py.

python scripts/generate_fault_reference.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torchtitan_lite.faults import CONDITIONS, KINDS, POINTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "proof.md"
BEGIN, END = "<!-- faults: written by scripts/generate_fault_reference.py -->\n\n", "\n<!-- end of faults -->"
TABLES = {"kind | what happens": KINDS, "condition | meaning": CONDITIONS, "point | when it is passed": POINTS}


def render(page: str) -> str:
    """Return `page` with new tables between the marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or {END.strip()}")
    tables = ("\n".join(_lines(header, table)) for header, table in TABLES.items())
    return before + BEGIN + "\n\n".join(tables) + "\n" + END + after


def _lines(header: str, table: Mapping[str, str]) -> Iterator[str]:
    yield from (f"| {header} |", "| --- | --- |")
    for name, meaning in table.items():
        yield f"| `{name}` | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
