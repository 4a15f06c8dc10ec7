"""Draw how it works: docs/images/save.svg, places.svg and restart.svg.

    python scripts/draw_how_it_works.py

docs/commit_protocol.md has the order of a save and of a start, docs/where_a_step_can_be.md what each place survives: a
picture changes when these do. Each one has a light and a dark appearance, and a card of its own colour: on a page whose
theme is not the reader's it is legible, too. The accent marks the way of the data, and what is safe in the end. The
script needs the standard library alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 760
LEFT, RIGHT = 28, 732
"""The borders of what is drawn on the card."""
TITLE_Y = 42
LABEL, NOTE = 14, 12.5
"""Sizes of text."""

FONT = "-apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif"
COLOURS = {  # of a class: the property, light, dark
    ".card": ("fill", "#ffffff", "#151b23"),
    ".box, .mark": ("fill", "#f6f8fa", "#212830"),
    ".wash": ("fill", "#e9edf1", "#2b323c"),
    ".safe, .head": ("fill", "#0757ba", "#4493f8"),
    ".ink": ("fill", "#1f2328", "#f0f6fc"),
    ".quiet": ("fill", "#59636e", "#9ea7b3"),
    ".inverse": ("fill", "#ffffff", "#0d1117"),
    ".card, .line": ("stroke", "#d0d7de", "#3d444d"),
    ".box, .open": ("stroke", "#9aa4af", "#5d6773"),
    ".way, .yes": ("stroke", "#0757ba", "#4493f8"),
    ".no": ("stroke", "#8b949e", "#7d8590"),
}
SHAPES = (
    ".open, .line, .way, .yes, .no { fill: none; } .open { stroke-dasharray: 5 4; } .way { stroke-width: 1.8; }"
    " .yes { stroke-width: 2.8; } .no { stroke-width: 1.8; } .yes, .no { stroke-linecap: round; }"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images"), help="folder of the pictures")
    arguments = parser.parse_args()
    for name, draw in PICTURES.items():
        (arguments.output / name).write_text("\n".join(draw()) + "\n", encoding="utf-8")


def save() -> Iterator[str]:
    """Yield the lines of a save: time to the right, and below training those who work for the save."""
    height, first, row = 448, 124, 60
    slot, gap = 80, 8
    start = RIGHT - 7 * slot + gap

    def at(number: float) -> float:
        return start + slot * number

    def middle(lane: int) -> float:
        return first + row * lane + 20

    yield from opening(
        height,
        "A save, GPU to disk",
        "With async_with_pinned_mem: after a step, training (on a GPU, its optimizer) waits while each rank copies its"
        " state into pinned, shared memory. Then training continues, and alongside it a writer process writes the"
        " rank's file with digests, by direct I/O, and syncs it. When all ranks have, rank 0 writes the manifest and"
        " renames step-N.staging to step-N: the step is committed. The copy stays as an in-memory snapshot.",
    )
    yield words(LEFT + 216, TITLE_Y, 'async_mode = "async_with_pinned_mem"', style="quiet", size=NOTE)
    # The time for which training is blocked goes through all lanes.
    half = (slot - gap) / 2
    yield rectangle("wash", at(1) - gap / 2, 72, slot, height - 72 - 24, radius=6)
    for line, text in enumerate(("training", "waits")):
        yield words(at(1) + half, 92 + 16 * line, text, anchor="middle", weight="600")
    yield words((at(2) + RIGHT) / 2, 100, "alongside training", anchor="middle")
    for end, x in ((at(2), at(2) + 112), (RIGHT, RIGHT - 112)):
        yield f'<path class="line" d="M{x:g} 95H{end:g}"/>'

    lanes = (
        ("Training", "GPU memory"),
        ("Staged copy", "pinned, shared memory"),
        ("Writer process", "one per rank"),
        ("Rank 0", "after all ranks"),
        ("Folder", "on the disk"),
    )
    for lane, (name, note) in enumerate(lanes):
        yield words(LEFT, middle(lane) - 3, name, weight="600")
        yield words(LEFT, middle(lane) + 14, note, style="quiet", size=NOTE)

    for number, name in ((0, "step N"), *((2 + after, f"N + {1 + after}") for after in range(5))):
        yield from _box(at(number), middle(0) - 20, slot - gap, 40, name)
    yield from _box(at(1), middle(1) - 20, slot - gap, 40, "copy")
    yield from _box(at(2), middle(1) - 20, 5 * slot - gap, 40, "stays as in-memory snapshot", style="open")
    yield from _box(at(2), middle(2) - 20, 2 * slot - gap - 16, 40, "rank file", "digests, direct I/O")
    yield from _box(at(4), middle(2) - 20, slot - gap, 40, "fsync")
    yield from _box(at(5), middle(3) - 20, slot - gap, 40, "manifest")
    yield from _box(at(2), middle(4) - 20, 4 * slot - gap, 40, "step-N.staging", style="open")
    yield from _box(at(6), middle(4) - 20, slot - gap, 40, "step-N", style="safe")
    yield words(at(6) + half, middle(4) + 36, "committed", anchor="middle", size=NOTE)

    yield from _arrow((at(0) + half, middle(0) + 20), (at(0) + half, middle(1)), (at(1), middle(1)))
    yield from _arrow((at(1) + half, middle(1) + 20), (at(1) + half, middle(2)), (at(2), middle(2)))
    yield from _arrow((at(4) - gap - 16, middle(2)), (at(4), middle(2)))
    yield from _arrow((at(4) + half, middle(2) + 20), (at(4) + half, middle(3)), (at(5), middle(3)))
    yield from _arrow((at(6) - gap, middle(3)), (at(6) + half, middle(3)), (at(6) + half, middle(4) - 20))
    yield words(at(6) + half, middle(3) - 8, "rename", anchor="middle")
    for x, lane in ((at(2) + half, 2), (at(5) + half, 3)):
        yield from _arrow((x, middle(lane) + 20), (x, middle(4) - 20))
    yield "</svg>"


def places() -> Iterator[str]:
    """Yield the lines of the places of a step: how it gets from one to the next, and what each survives."""
    height, first, row = 504, 120, 62
    events = (("ranks", "killed"), ("one host", "lost"), ("all hosts", "reboot"), ("disk or", "cluster lost"))
    survives = ("----", "y---", "yy--", "y-y-", "yyy-", "yyyy")  # from the top: each event, as in `events`
    column = 96
    matrix = RIGHT - 4 * column

    def top(number: int) -> int:
        return first + row * number

    yield from opening(
        height,
        "What each place survives",
        "The ranks' own memory survives nothing. From there a copy goes into an in-memory snapshot, which the keeper"
        " holds: it survives killed ranks. A peer copy of it in the next host's memory also survives the loss of one"
        " host. A save writes the folder: on a local disk it survives killed ranks and reboots, shared by the hosts"
        " also lost hosts. From there each checkpoint is uploaded; an upload folder or bucket survives all of these"
        " and the loss of the disk or the cluster.",
    )
    for number, lines in enumerate(events):
        for line, text in enumerate(lines):
            yield words(matrix + column * (number + 0.5), 84 + 17 * line, text, anchor="middle", size=NOTE)
    for number, marks in enumerate(survives):
        yield f'<path class="line" d="M{matrix} {top(number) - 11}H{RIGHT}"/>'
        for which, mark in enumerate(marks):
            x, y = matrix + column * (which + 0.5), top(number) + 20
            yield _check(x, y) if mark == "y" else _cross(x, y)

    wide, inset, spine = 284, 32, LEFT + 16
    yield from _box(LEFT, top(0), wide, 40, "Ranks' own memory", "GPU or host", style="open")
    yield from _box(LEFT, top(1), wide, 40, "In-memory snapshot", "this host, held by keeper")
    yield from _box(LEFT + inset, top(2), wide - inset, 40, "Peer copy", "the next host's memory")
    yield rectangle("box", LEFT, top(3), wide, row + 40, radius=6)
    yield f'<path class="line" d="M{LEFT + 116} {top(3) + row - 11}H{LEFT + wide}"/>'
    yield f'<path class="line" d="M{LEFT + 116} {top(3)}V{top(4) + 40}"/>'
    yield words(LEFT + 58, top(3) + row / 2 + 25, "Folder", anchor="middle", weight="600")
    yield words(LEFT + 200, top(3) + 25, "on a local disk", anchor="middle")
    yield words(LEFT + 200, top(4) + 25, "shared by hosts", anchor="middle")
    yield from _box(LEFT, top(5), wide, 40, "Upload folder", "or bucket, once uploaded", style="safe")

    for begin, end, x, name in (
        (top(0) + 40, top(1), spine, "copy"),
        (top(1) + 40, top(3), spine, "write"),
        (top(1) + 40, top(2), spine + inset, "network"),
        (top(4) + 40, top(5), spine, "upload"),
    ):
        yield from _arrow((x, begin), (x, end))
        yield words(x + 12, end - 7, name, style="quiet", size=NOTE)
    yield "</svg>"


def restart() -> Iterator[str]:
    """Yield the lines of a restart: from the kill, to the choice among the places, to training."""
    height, wide, between = 416, 208, 40
    columns = [LEFT + (wide + between) * number for number in range(3)]
    rows = (76, 196, 336)

    yield from opening(
        height,
        "A restart after a kill",
        "The launcher starts the ranks again. Rank 0 takes the lease of the folder and removes the leftovers of the"
        " killed save. The ranks choose the latest complete step; of equals the nearest one: in-memory snapshot,"
        " folder, upload folder. They compare each block with its digest; if one is damaged, the next older step is"
        " loaded. Model, optimizer and sample position are restored, and training continues with the same samples.",
    )
    yield from _box(columns[0], rows[0], wide, 48, "Ranks are killed", "in a step or save")
    yield from _box(columns[1], rows[0], wide, 48, "Launcher starts ranks", "with the same command")
    yield from _box(columns[2], rows[0], wide, 48, "Rank 0 takes lease", "and removes leftovers")

    yield rectangle("wash", LEFT, rows[1] - 40, RIGHT - LEFT, 104, radius=6)
    yield words(LEFT + 16, rows[1] - 15, "Latest complete step", weight="600")
    yield words(LEFT + 204, rows[1] - 15, "of equals, the nearest", style="quiet", size=NOTE)
    inner = (RIGHT - LEFT - 32 - 2 * between) / 3
    for number, (name, note) in enumerate(
        (("Snapshot", "this host or peer"), ("Folder", "step-N"), ("Upload folder", "or bucket"))
    ):
        x = LEFT + 16 + (inner + between) * number
        yield from _box(x, rows[1], inner, 48, name, note)
        if number:
            yield words(x - between / 2, rows[1] + 29, "or", style="quiet", anchor="middle", size=NOTE)

    yield from _box(columns[0], rows[2], wide, 48, "Blocks are verified", "each against its digest")
    yield from _box(columns[1], rows[2], wide, 48, "State is restored", "model, optimizer, data")
    yield from _box(columns[2], rows[2], wide, 48, "Training continues", "with the same samples", style="safe")

    for y in (rows[0] + 24, rows[2] + 24):
        for x in columns[1:]:
            yield from _arrow((x - between, y), (x, y))
    yield from _arrow((columns[2] + wide / 2, rows[0] + 48), (columns[2] + wide / 2, rows[1] - 40))
    yield from _arrow((LEFT + 48, rows[1] + 64), (LEFT + 48, rows[2]))
    yield from _arrow((LEFT + 160, rows[2]), (LEFT + 160, rows[1] + 64))
    yield words(LEFT + 172, rows[2] - 33, "damaged: next older one")
    yield "</svg>"


PICTURES: Mapping[str, Callable[[], Iterator[str]]] = {
    "save.svg": save,
    "places.svg": places,
    "restart.svg": restart,
}


def opening(height: int, title: str, description: str) -> Iterator[str]:
    """Yield the root, the names for screen readers, the colours of both appearances, the card and its title."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-labelledby="title desc" font-family="{FONT}">'
    )
    yield f'<title id="title">{escape(title)}</title>'
    yield f'<desc id="desc">{escape(description)}</desc>'
    light = " ".join(f"{names} {{ {what}: {colour}; }}" for names, (what, colour, _) in COLOURS.items())
    dark = " ".join(f"{names} {{ {what}: {colour}; }}" for names, (what, _, colour) in COLOURS.items())
    yield f"<style>{light} {SHAPES} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"
    yield rectangle("card", 1, 1, WIDTH - 2, height - 2, radius=10)
    yield words(LEFT, TITLE_Y, title, size=17, weight="600")


def _box(
    x: float, y: float, width: float, height: float, label: str, note: str = "", *, style: str = "box"
) -> Iterator[str]:
    """Yield a box with its label in the middle, and the note below it."""
    ink, quiet = ("inverse", "inverse") if style == "safe" else ("ink", "quiet")
    middle, base = x + width / 2, y + height / 2 + 5
    yield rectangle(style, x, y, width, height, radius=6)
    yield words(middle, base - 8 if note else base, label, style=ink, anchor="middle", weight="600" if note else "400")
    if note:
        yield words(middle, base + 8, note, style=quiet, anchor="middle", size=NOTE)


def rectangle(style: str, x: float, y: float, width: float, height: float, *, radius: int) -> str:
    """Return a rectangle in the colours of `style`."""
    return f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"/>'


def _arrow(*points: tuple[float, float]) -> Iterator[str]:
    """Yield a line through `points`, horizontal and vertical ones, that ends in a head."""
    *_, (before_x, before_y), (x, y) = points
    right, down = _sign(x - before_x), _sign(y - before_y)
    shaft = [*points[:-1], (x - 6 * right, y - 6 * down)]
    yield f'<path class="way" d="M{"L".join(f"{x:g} {y:g}" for x, y in shaft)}"/>'
    back_x, back_y = x - 7 * right, y - 7 * down
    side_x, side_y = 4.5 * down, 4.5 * right
    yield (
        f'<path class="head" d="M{x:g} {y:g}L{back_x + side_x:g} {back_y + side_y:g}'
        f'L{back_x - side_x:g} {back_y - side_y:g}Z"/>'
    )


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


def _check(x: float, y: float) -> str:
    return f'<path class="yes" d="M{x - 8:g} {y:g}l5.5 6l10.5 -12"/>'


def _cross(x: float, y: float) -> str:
    return f'<path class="no" d="M{x - 4.5:g} {y - 4.5:g}l9 9m0 -9l-9 9"/>'


def words(
    x: float,
    y: float,
    text: str,
    *,
    style: str = "ink",
    anchor: str = "start",
    size: float = LABEL,
    weight: str = "400",
) -> str:
    """Return a line of text at (x, y)."""
    return (
        f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}"'
        f' font-weight="{weight}">{escape(text)}</text>'
    )


if __name__ == "__main__":
    main()
