"""SVG as text, at any width: x is in percent of the drawing, y in pixels. Pure.

Text keeps its size when the page gets narrow, because nothing is scaled. Only a curve is in a drawing of its own that
is stretched: 1000 units are its width, and its lines keep their thickness.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

from torchtitan_lite.report.scales import Scale, short_step

CURVE_WIDTH = 1000
BADGE_ROWS = 3
_BADGE_SHARE = 0.055
"""Of the width that a badge needs on a narrow screen."""


@dataclass(frozen=True)
class Figure:
    """A drawing, and what the page writes next to it."""

    svg: str
    legend: tuple[tuple[str, str], ...] = ()
    """The class of a sample, and its label."""
    note: str = ""
    top: int = 8
    """Pixels that it needs above itself."""
    kind: str = ""
    """A class for the page."""


def element(name: str, *children: str, **attributes: object) -> str:
    """Return an element. `class_` is the attribute class, `stroke_width` is stroke-width; None is left out."""
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_attribute_text(value))}"
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(children)
    return f"<{name}{written}>{content}</{name}>" if content else f"<{name}{written}/>"


def text(content: str, **attributes: object) -> str:
    return element("text", escape(content), **attributes)


def title(content: str) -> str:
    """Return the text that a browser shows over its parent."""
    return element("title", escape(content))


def rect(begin: float, width: float, y: float, height: float, kind: str, label: str = "") -> str:
    """Return a rectangle of the class `kind` and these shares of the width; a browser shows `label` over it."""
    children = [title(label)] if label else []
    return element("rect", *children, x=percent(begin), y=y, width=percent(width), height=height, class_=kind)


def percent(share: float) -> str:
    """Return a share of the width as SVG writes it."""
    return f"{_short(100 * share, 2)}%"


def drawing(height: int, label: str, children: Iterable[str]) -> str:
    """Return the drawing with these parts; `label` is for those who do not see it."""
    return element("svg", *children, class_="fluid", width="100%", height=height, role="img", aria_label=label)


def curve(height: int, *paths: str) -> str:
    """Return the stretched drawing of these paths."""
    box = f"0 0 {CURVE_WIDTH} {height}"
    return element("svg", *paths, viewBox=box, width="100%", height=height, preserveAspectRatio="none")


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Return the path through `points`, in units of a curve."""
    return "".join(f"{'L' if at else 'M'}{_short(x, 1)} {_short(y, 1)}" for at, (x, y) in enumerate(points))


def area_path(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    """Return the area between two lines, in units of a curve."""
    return line_path([*upper, *reversed(lower)]) + "Z" if upper else ""


def at(x: float, y: float, shape: str, **attributes: object) -> str:
    """Return `shape`, drawn about 0, 0, at the share `x` of the width and the pixel `y`."""
    return element("svg", shape, x=percent(x), y=y, overflow="visible", **attributes)


def frame(height: int, x: Scale, y: Scale | None) -> Iterator[str]:
    """Yield the grid and the numbers of the axes."""
    for tick in y.ticks if y is not None else ():
        assert y is not None
        level = height * (1 - y.at(tick))
        yield element("line", x1="0", x2="100%", y1=level, y2=level, class_="grid")
        yield text(y.text(tick), x=-8, y=level + 4, class_="tick", text_anchor="end")
    yield element("line", x1="0", x2="100%", y1=height, y2=height, class_="axis")
    for index, tick in enumerate(x.ticks):
        share = x.at(tick)
        anchor = "end" if share > 0.98 else "middle"
        kind = "tick wide" if index % 2 else "tick"
        yield element("line", x1=percent(share), x2=percent(share), y1=height, y2=height + 4, class_="axis")
        yield text(short_step(tick), x=percent(share), y=height + 18, class_=kind, text_anchor=anchor)
    yield text("step", x=-8, y=height + 18, class_="tick", text_anchor="end")


@dataclass(frozen=True, order=True)
class AxisBadge:
    """A place on the axis of steps that has a badge above the drawing."""

    share: float
    """Of the width."""
    word: str
    label: str
    kind: str = ""


def badges(height: int, marks: Sequence[AxisBadge]) -> Iterator[str]:
    """Yield a dashed line with a badge above it for each mark."""
    for mark, row in zip(sorted(marks), badge_rows(marks), strict=True):
        level, place = -14 - 21 * row, percent(mark.share)
        yield element("line", x1=place, x2=place, y1=level + 9, y2=height, class_=f"mark {mark.kind}")
        badge = element("circle", r=9, class_=f"badge {mark.kind}") + text(
            mark.word, y=4, class_="badge", text_anchor="middle"
        )
        yield at(mark.share, level, element("g", title(mark.label), badge))


def badge_rows(marks: Sequence[AxisBadge]) -> list[int]:
    """Return the row of each badge, in the order of their places: the lowest one in which it covers no other."""
    ends, rows = [-1.0] * BADGE_ROWS, []
    for mark in sorted(marks):
        row = next((index for index, end in enumerate(ends) if mark.share - end >= _BADGE_SHARE), 0)
        ends[row] = mark.share
        rows.append(row)
    return rows


def hits(height: int, columns: Iterable[tuple[float, float, str]]) -> Iterator[str]:
    """Yield invisible columns, each with its shares of the width and the text that a browser shows over it."""
    for begin, end, label in columns:
        yield rect(begin, max(end - begin, 0.001), 0, height, "hit", label)


def _attribute_text(value: object) -> str:
    return _short(value, 2) if isinstance(value, float) else str(value)


def _short(value: float, digits: int) -> str:
    written = f"{value:.{digits}f}"
    return written.rstrip("0").rstrip(".") if "." in written else written
