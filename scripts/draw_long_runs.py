"""Draw docs/images/long_folders.svg and many_saves.svg: what a long history costs, and what a process keeps of saves.

    python scripts/bench_long_folders.py --json long_folders.json
    python scripts/bench_many_saves.py --leak --json many_saves.json
    python scripts/draw_long_runs.py long_folders.json many_saves.json

Every point comes from these files. The pictures have the colours of draw_how_it_works.py, and need the standard library
alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.draw_how_it_works import LEFT, NOTE, RIGHT, opening, words

TOP, BOTTOM = 96, 286
"""The borders of every plot; its name is above, the numbers of its axis below."""
LOW, HIGH, GAP = 348, 376, 30
STYLES = ("way", "no", "open")
"""Of the curves of a plot: blue, grey, dashed."""
SHOWN = {
    "steps": {"start s": "start", "save s": "save", "ls s": "ls"},
    "starts": {"start s": "start", "save s": "save", "ls s": "ls"},
    "tensors": {"first save s": "first save", "later save s": "later save", "load s": "load"},
}
NAMES = {"async_with_pinned_mem": "async, pinned", "leak": "planted leak"}

Points = Iterable[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """Where a number is, from `begin` on the picture to `end`."""

    lowest: float
    highest: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, number: float) -> float:
        scale = math.log10 if self.is_log else float
        low, high, number = scale(self.lowest), scale(self.highest), scale(number)
        return self.begin + (self.end - self.begin) * (number - low) / (high - low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("long_folders", type=Path, help="the figures of bench_long_folders.py")
    parser.add_argument("many_saves", type=Path, help="the figures of bench_many_saves.py")
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="folder of the pictures")
    arguments = parser.parse_args()
    for path, draw in ((arguments.long_folders, long_folders), (arguments.many_saves, many_saves)):
        lines = draw(json.loads(path.read_text(encoding="utf-8")))
        (arguments.output / f"{draw.__name__}.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


def long_folders(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the seconds by length: a plot for each kind of length, both axes logarithmic."""
    figures: Mapping[str, Mapping[str, Mapping[str, float]]] = document["figures"]
    yield from opening(
        HIGH,
        "Seconds, by the length of the history",
        "Three plots with logarithmic axes. By steps, of which the latest 200 are kept, and by starts, with 10 steps"
        " kept: the time of a start, of a save and of ls. By tensors: of the first save, a later one, and a load.",
    )
    shown = [(kind, found) for kind, of_kind in figures.items() for found in of_kind.values()]
    seconds = [found[name] for kind, found in shown for name in SHOWN[kind]]
    lowest, highest = 10 ** math.floor(math.log10(min(seconds))), 10 ** math.ceil(math.log10(max(seconds)))
    for number, (kind, of_kind) in enumerate(figures.items()):
        left, right = _columns(len(figures), number)
        lengths = [int(length) for length in of_kind]
        across = Axis(lengths[0], lengths[-1], left, right, is_log=True)
        up = Axis(lowest, highest, BOTTOM, TOP, is_log=True)
        decades = [lowest * 10**power for power in range(round(math.log10(highest / lowest)) + 1)]
        yield from _grid(kind, across, up, {each: f"{each:g} s" for each in decades}, lengths, has_numbers=number == 0)
        for row, (style, (name, text)) in enumerate(zip(STYLES, SHOWN[kind].items(), strict=True)):
            yield from _curve(style, across, up, ((int(length), found[name]) for length, found in of_kind.items()))
            yield from _legend(style, text, left, row)
    yield "</svg>"


def many_saves(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the private memory by saves: a plot for each mode."""
    yield from opening(
        LOW,
        f"Private memory, kB above that after {document['window']:,} saves",
        "A plot for each mode, with equal axes: without saves, and with saves in each mode, the memory of the trainer"
        " and of its helper processes. In the last one the loop keeps 300 bytes and a descriptor of each save.",
    )
    curves = {}
    for mode, looks in document["looks"].items():
        later = [look for look in looks if look["save"] >= document["window"]]
        names = [name for name in ("trainer_rss", "helpers_rss") if name in later[0]]
        curves[mode] = [[(look["save"], (look[name] - later[0][name]) / 1000) for look in later] for name in names]
    values = [value for of_mode in curves.values() for points in of_mode for _, value in points]
    highest = 200 * math.ceil(max(200.0, *values) / 200)
    lowest = -200 * math.ceil(max(0.0, -min(values)) / 200)
    for number, (mode, of_mode) in enumerate(curves.items()):
        left, right = _columns(len(curves), number)
        first, last = of_mode[0][0][0], of_mode[0][-1][0]
        across, up = Axis(first, last + 1e-9, left, right), Axis(lowest, highest, BOTTOM, TOP)
        numbers = {each: f"{each}" for each in range(lowest, highest + 1, 200)}
        yield from _grid(NAMES.get(mode, mode), across, up, numbers, [first, last], has_numbers=number == 0)
        for style, points in zip(STYLES, of_mode, strict=False):
            yield from _curve(style, across, up, points)
    for number, text in enumerate(("trainer", "helper processes")):
        yield from _legend(STYLES[number], text, _columns(len(curves), 0)[0] + 110 * number, 0)
    yield words(RIGHT, BOTTOM + 44, "saves", style="quiet", anchor="end", size=NOTE)
    yield "</svg>"


def _columns(count: int, number: int) -> tuple[float, float]:
    """Return the borders of the plot `number` of `count`, right of the numbers of the axis."""
    first = LEFT + 52
    width = (RIGHT - first + GAP) / count
    return first + width * number, first + width * (number + 1) - GAP


def _grid(
    name: str, across: Axis, up: Axis, numbers: Mapping[float, str], marks: Iterable[float], *, has_numbers: bool
) -> Iterator[str]:
    yield words(across.begin, TOP - 16, name, weight="600")
    for number, text in numbers.items():
        y = up.at(number)
        yield f'<path class="line" d="M{across.begin:g} {y:.1f}H{across.end:g}"/>'
        if has_numbers:
            yield words(across.begin - 8, y + 4, text, style="quiet", anchor="end", size=NOTE)
    for mark in marks:
        x = across.at(mark)
        yield f'<path class="line" d="M{x:.1f} {BOTTOM}v5"/>'
        short = f"{mark / 1000:.0f}k" if mark >= 10_000 else f"{mark:,.0f}"
        anchor = "start" if x < across.begin + 1 else "end" if x > across.end - 1 else "middle"
        yield words(x, BOTTOM + 20, short, style="quiet", anchor=anchor, size=NOTE)


def _curve(style: str, across: Axis, up: Axis, points: Points) -> Iterator[str]:
    yield f'<path class="{style}" d="M{"L".join(f"{across.at(x):.1f} {up.at(y):.1f}" for x, y in points)}"/>'


def _legend(style: str, text: str, left: float, row: int) -> Iterator[str]:
    y = BOTTOM + 44 + 16 * row
    yield f'<path class="{style}" d="M{left:g} {y - 4}h22"/>'
    yield words(left + 30, y, text, size=NOTE)


if __name__ == "__main__":
    main()
