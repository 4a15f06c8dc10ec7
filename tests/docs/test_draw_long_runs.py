"""The pictures of long histories and of many saves show every figure that they are given, in two appearances."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.draw_long_runs import SHOWN, long_folders, many_saves

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SVG = "{http://www.w3.org/2000/svg}"


def folders() -> dict[str, Any]:
    of = {"10": 0.01, "1000": 1.0}.items()
    return {"figures": {kind: {n: dict.fromkeys(names, s) for n, s in of} for kind, names in SHOWN.items()}}


def saves() -> dict[str, Any]:
    looks = [{"save": save, "trainer_rss": 1e6 + 300.0 * save, "helpers_rss": 1e6} for save in (10, 20, 30, 40)]
    of_alone = [{key: value for key, value in look.items() if key != "helpers_rss"} for look in looks]
    return {"window": 20, "looks": {"no saves": of_alone, "async_with_pinned_mem": looks}}


def curves_of(lines: list[str]) -> list[list[tuple[float, float]]]:
    """Return the points of each curve, those of the legend apart."""
    paths = [each.attrib for each in ElementTree.fromstring("\n".join(lines)).iter(f"{SVG}path")]
    drawn = [path["d"] for path in paths if path["class"] != "line" and "L" in path["d"]]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", points)] for points in drawn]


def test_each_kind_of_length_has_three_curves_over_all_lengths() -> None:
    curves = curves_of([*long_folders(folders())])
    assert len(curves) == 9
    for points in curves:
        (x, y), (later_x, later_y) = points
        assert x < later_x and y > later_y, "1 s is above 0.01 s"


def test_what_a_process_needs_once_is_not_drawn_and_growth_is() -> None:
    curves = curves_of([*many_saves(saves())])
    assert [len(points) for points in curves] == [3, 3, 3], "the trainer alone, then the trainer and its helpers"
    alone, trainer, helpers = curves
    assert alone[0][1] > alone[-1][1] and trainer[0][1] > trainer[-1][1]
    assert len({y for _, y in helpers}) == 1


def test_the_pictures_in_the_docs_have_both_appearances_and_are_small() -> None:
    for name in ("long_folders.svg", "many_saves.svg"):
        text = (IMAGES / name).read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text and len(text) < 60_000
        assert "href" not in text and "url(" not in text and "<script" not in text
