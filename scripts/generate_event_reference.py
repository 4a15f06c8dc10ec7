"""Write the table of events in docs/watching.md from the classes of torchtitan_lite/events.py and their docstrings.

python scripts/generate_event_reference.py
"""

from __future__ import annotations

import inspect
from pathlib import Path

from torchtitan_lite.config.argument_parser import doc_strings
from torchtitan_lite.events import EVENTS, Event

PAGE = Path(__file__).resolve().parents[1] / "docs" / "watching.md"
BEGIN, END = "<!-- events: written by scripts/generate_event_reference.py -->\n\n", "\n<!-- end of events -->"
LINKS = {
    "copy in memory": "where_a_step_can_be.md#in-memory-snapshots",
    "interval from now on": "intervals.md#an-interval-that-chooses-itself",
    "`memory`": "where_a_step_can_be.md#what-a-start-loads",
    "by part": "#where-the-time-goes",
}
"""Where the pages have more about these words."""


def render(page: str) -> str:
    """Return `page` with a new table between the marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| event | meaning | figures |", "| --- | --- | --- |", *map(_row, EVENTS.values())]
    return before + BEGIN + "\n".join(lines) + "\n" + END + after


def _row(kind: type[Event]) -> str:
    of_all = doc_strings(Event)
    figures = "; ".join(f"`{name}`: {_phrase(doc)}" for name, doc in doc_strings(kind).items() if name not in of_all)
    row = f"| `{kind.name}` | {_phrase(inspect.getdoc(kind) or '')} | {figures} |"
    for words, target in LINKS.items():
        row = row.replace(words, f"[{words}]({target})", 1)
    return row


def _phrase(text: str) -> str:
    return text[0].lower() + text[1:].removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
