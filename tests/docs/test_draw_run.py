"""The picture of a killed and resumed run comes from the runs, and only if their losses are equal."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.draw_run import LOSS, check, draw, read_runs

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "run.svg"


def test_the_picture_shows_the_kill_the_resume_and_every_save(tmp_path: Path) -> None:
    _write_runs(tmp_path, losses=[6.2, 5.0, 4.1, 3.3])
    runs = read_runs(tmp_path / "straight", tmp_path / "resumed", tmp_path / "killed.jsonl")
    check(runs)
    drawn = ElementTree.fromstring("\n".join(draw(runs)))
    texts = [text for each in drawn.iter() if each.tag.endswith("text") and (text := each.text)]
    assert any("Killed at step 3, resumed from step 2" in text for text in texts)
    # A circle for each save, one where the second start begins, and one in the explanation.
    assert sum(each.tag.endswith("circle") for each in drawn.iter()) == 2 + 1 + 1


def test_runs_whose_losses_differ_are_not_drawn(tmp_path: Path) -> None:
    _write_runs(tmp_path, losses=[6.2, 5.0, 4.1, 3.3], resumed_to=[3.3000000000000003])
    runs = read_runs(tmp_path / "straight", tmp_path / "resumed", tmp_path / "killed.jsonl")
    with pytest.raises(SystemExit, match="first at step 4"):
        check(runs)


def test_the_picture_in_the_docs_is_small_and_needs_no_other_file() -> None:
    text = PICTURE.read_text(encoding="utf-8")
    assert len(text) < 60_000
    assert "href" not in text and "url(" not in text and "<script" not in text


def _write_runs(folder: Path, losses: list[float], resumed_to: list[float] | None = None) -> None:
    """Write a run of four steps that was killed after step 3 and resumed from step 2, as the trainer does."""
    _write(folder / "straight" / "metrics.jsonl", _metrics(losses))
    _write(folder / "killed.jsonl", _metrics(losses[:3]))
    _write(folder / "resumed" / "metrics.jsonl", _metrics(losses[:3] + (resumed_to or losses[3:])))
    events = [("committed", 2), ("loaded", 2), ("resumed", 2), ("committed", 4), ("finished", 4)]
    _write(folder / "resumed" / "events.jsonl", [{"event": event, "step": step} for event, step in events])


def _metrics(losses: list[float]) -> list[dict[str, object]]:
    return [{"step": step, LOSS: loss} for step, loss in enumerate(losses, start=1)]


def _write(path: Path, objects: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in objects))
