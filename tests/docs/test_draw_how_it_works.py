"""The pictures of how it works are what their script draws, in two appearances, and their text has room."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from scripts.draw_how_it_works import COLOURS, PICTURES

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"
EM = {"400": 0.57, "600": 0.64}
"""Of a character, by weight: how wide it is in DejaVu Sans, the widest of the fonts, on average."""

each_picture = pytest.mark.parametrize("name", PICTURES)


class Area(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def holds(self, other: Area) -> bool:
        return self.left <= other.left and other.right <= self.right and self.top <= other.top < self.bottom

    def meets(self, other: Area) -> bool:
        is_apart = self.right <= other.left or other.right <= self.left
        return not is_apart and self.top < other.bottom and other.top < self.bottom


@each_picture
def test_the_picture_in_the_docs_is_what_the_script_draws(name: str) -> None:
    drawn = "\n".join(PICTURES[name]()) + "\n"
    assert (IMAGES / name).read_text(encoding="utf-8") == drawn, "run scripts/draw_how_it_works.py"


@each_picture
def test_it_has_both_appearances_and_says_what_it_shows(name: str) -> None:
    root = ElementTree.fromstring("\n".join(PICTURES[name]()))
    title, description = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
    assert title and description and len(description) > len(title)
    light, _, dark = (root.findtext(f"{SVG}style") or "").partition("@media (prefers-color-scheme: dark)")
    for names, (what, in_light, in_dark) in COLOURS.items():
        assert f"{names} {{ {what}: {in_light}; }}" in light and f"{names} {{ {what}: {in_dark}; }}" in dark
    coloured = set(re.findall(r"\.(\w+)", " ".join(COLOURS)))
    used = {each.attrib["class"] for each in root.iter() if "class" in each.attrib}
    assert used <= coloured, "a class without a colour is black in both"
    assert not any("fill" in each.attrib or "stroke" in each.attrib for each in root.iter()), "the same in both"


@each_picture
def test_each_text_has_at_most_five_words_and_room_in_its_box(name: str) -> None:
    assert [*_without_room("\n".join(PICTURES[name]()))] == []


def test_a_text_without_room_is_seen() -> None:
    drawn = "\n".join(PICTURES["save.svg"]())
    for text, longer, seen in (
        ("copy", "a longer name", "a longer name"),
        ("Training", "Training of a small model", "Training of a small model / step N"),
        ("alongside training", "a b c d e f", "a b c d e f"),
    ):
        assert [*_without_room(drawn.replace(f">{text}<", f">{longer}<"))] == [seen]


def _without_room(drawn: str) -> Iterator[str]:
    """Yield the texts that are too long, wider than the smallest box around their middle, or on another text."""
    root = ElementTree.fromstring(drawn)
    boxes = sorted(_boxes(root), key=lambda box: (box.right - box.left) * (box.bottom - box.top))
    texts = [(text.text or "", _area(text)) for text in root.iter(f"{SVG}text")]
    for text, area in texts:
        middle = (area.left + area.right) / 2
        box = next(box for box in boxes if box.holds(area._replace(left=middle, right=middle)))
        if not box.holds(area) or not 1 <= len(text.split()) <= 5:
            yield text
    for (text, area), (other, its_area) in combinations(texts, 2):
        if area.meets(its_area):
            yield f"{text} / {other}"


def _boxes(root: ElementTree.Element) -> Iterator[Area]:
    for box in root.iter(f"{SVG}rect"):
        x, y, width, height = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        yield Area(x, y, x + width, y + height)


def _area(text: ElementTree.Element) -> Area:
    """Return where `text` is, estimated from its number of characters."""
    x, y, size = (float(text.attrib[name]) for name in ("x", "y", "font-size"))
    width = len(text.text or "") * size * EM[text.attrib["font-weight"]]
    left = x - width / 2 if text.attrib["text-anchor"] == "middle" else x
    return Area(left, y - 0.75 * size, left + width, y + 0.25 * size)
