"""The picture of a terminal has what the recording has, and needs no other file."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from scripts.draw_terminal import draw, lines, wrapped

IMAGES = Path(__file__).parents[2] / "docs" / "images"
RECORDING = (
    "start\r\n\x1b[1mstep 1/9\x1b[0m  loss 5\r\r\x1b[K"
    "a log line that is longer than the terminal\r\n\x1b[1mstep 1/9\x1b[0m  loss 5\r\r\x1b[K"
    "\x1b[1mstep 2/9\x1b[0m  loss 4\r\r\x1b[K\x1b[1mstep 3/9\x1b[0m  loss 4\r\r\x1b[KTraining completed\r\n"
)


def test_the_picture_shows_the_last_drawing_below_complete_lines_of_the_terminals_width() -> None:
    shown = lines(RECORDING, "step 2/9", since="a log")
    assert [line.plain for line in shown] == ["a log line that is longer than the terminal", "step 2/9  loss 4"]
    rows = [row for line in shown for row in wrapped(line, 20)]
    assert [row.plain for row in rows] == ["a log line that is l", "onger than the termi", "nal", "step 2/9  loss 4"]
    drawn = ElementTree.fromstring(draw(rows, 20, "run"))
    texts = "".join(drawn.itertext()).replace("\xa0", " ")
    assert "onger than the termi" in texts and "step 2/9" in texts and "step 1/9" not in texts


def test_the_pictures_in_the_docs_are_small_and_need_no_other_file() -> None:
    for path in IMAGES.glob("*.svg"):
        text = path.read_text(encoding="utf-8")
        assert len(text) < 60_000, path
        assert "href" not in text and "url(h" not in text and "@font-face" not in text and "<script" not in text, path
