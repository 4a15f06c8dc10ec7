"""Draw a terminal as it was at one moment of a recorded command, such as docs/images/terminal.svg.

    script -qec "stty cols 80 rows 30; ./run_train.sh --training.steps 120 --checkpoint.interval 20" run.typescript
    python scripts/draw_terminal.py run.typescript --until "step 96/120" --output docs/images/terminal.svg

Every character comes from the recording: colours, the lines that a terminal of this width wraps, and the line that is
drawn again and again in its place. Lines above are left out if they do not fit. Like the rest of the docs the picture
needs no other file: rich's own style of SVG asks a server for its font.
"""

from __future__ import annotations

import argparse
import io
import re
from collections.abc import Iterator
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}", re.DOTALL)
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
RECORDING = re.compile(r"^Script (?:started|done) on .*$\n?", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, help="what `script` wrote")
    parser.add_argument("--until", required=True, help="text of the last line of the picture")
    parser.add_argument("--since", default="", help="text of its first line; by default as many as fit")
    parser.add_argument("--title", default="./run_train.sh")
    parser.add_argument("--columns", type=int, default=80)
    parser.add_argument("--rows", type=int, default=30)
    parser.add_argument("--output", type=Path, default=Path("docs/images/terminal.svg"))
    arguments = parser.parse_args()
    recorded = RECORDING.sub("", arguments.recording.read_bytes().decode())
    rows = [
        row for line in lines(recorded, arguments.until, arguments.since) for row in wrapped(line, arguments.columns)
    ]
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(draw(rows[-arguments.rows :], arguments.columns, arguments.title), encoding="utf-8")


def lines(recorded: str, until: str, since: str = "") -> list[Text]:
    """Return the lines of the terminal at the moment when `until` has been drawn for the first time."""
    end = recorded.find("\r", recorded.index(until))
    shown = [_last_drawn(line) for line in recorded[: end if end >= 0 else None].split("\n")]
    first = next(number for number, line in enumerate(shown) if since in line)
    return [Text.from_ansi(line) for line in shown[first:]]


def wrapped(line: Text, columns: int) -> Iterator[Text]:
    """Yield the rows that `line` takes on a terminal, which wraps in the middle of words."""
    yield from line.divide(range(columns, len(line), columns)) if len(line) else [line]


def draw(rows: list[Text], columns: int, title: str) -> str:
    """Return the SVG of a terminal with these rows."""
    console = Console(
        record=True,
        width=columns,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for row in rows:
        console.print(row, no_wrap=True, overflow="crop")
    style = FONT_FACE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, monospace", FONT)
    drawn = console.export_svg(title=title, theme=MONOKAI, code_format=style, unique_id="terminal")
    return re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE)


def _last_drawn(line: str) -> str:
    """Return what is left of a line that was drawn several times: each time begins with a return and an erasure."""
    return line.rstrip("\r").rpartition("\r\x1b[K")[2].rstrip("\r")


if __name__ == "__main__":
    main()
