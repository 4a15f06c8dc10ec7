"""Draw docs/images/run.svg: a run that was killed and resumed, over the same run without interruption.

    options="--job.config_file llama_debug.toml --training.steps 120 --checkpoint.interval 20 --metrics.log_freq 1"
    python train.py $options --job.dump_folder straight
    python train.py $options --job.dump_folder resumed       # kill -9 in the middle
    cp resumed/metrics.jsonl killed.jsonl                    # a resume drops the lines after the step that it loads
    python train.py $options --job.dump_folder resumed
    python scripts/draw_run.py straight resumed --killed killed.jsonl

Every point and mark comes from the metrics.jsonl and events.jsonl of these runs; set OMP_NUM_THREADS to the same number
for all of them. If a loss differs in any bit, the script ends with an error and draws nothing. It needs the standard
library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

LOSS = "loss_metrics/global_avg_loss"

WIDTH, HEIGHT = 880, 496
LEFT, RIGHT, TOP, BOTTOM = 84, 850, 104, 348
"""The borders of the plot of losses; the two starts are rows below it."""
FIRST_ROW, SECOND_ROW = 400, 432
INK, QUIET, GRID, CARD, BORDER = "#1f2328", "#59636e", "#e4e8ec", "#ffffff", "#d0d7de"
STRAIGHT, FIRST, SECOND, LOST = "#c9d1da", "#c2410c", "#0757ba", "#fdf0e7"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The losses of the runs by step, and what happened to the one that was killed."""

    straight: Mapping[int, float]
    killed: Mapping[int, float]
    resumed: Mapping[int, float]
    saved: tuple[int, ...]
    loaded: int

    @property
    def kill(self) -> int:
        """The last step that was logged before the kill."""
        return max(self.killed)

    @property
    def last(self) -> int:
        return max(self.straight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("straight", type=Path, help="dump folder of the run without interruption")
    parser.add_argument("resumed", type=Path, help="dump folder of the run that was killed once and resumed")
    parser.add_argument("--killed", type=Path, required=True, help="its metrics.jsonl as it was before it was resumed")
    parser.add_argument("--output", type=Path, default=Path("docs/images/run.svg"))
    arguments = parser.parse_args()
    runs = read_runs(arguments.straight, arguments.resumed, arguments.killed)
    check(runs)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text("\n".join(draw(runs)) + "\n", encoding="utf-8")


def read_runs(straight: Path, resumed: Path, killed: Path) -> Runs:
    """Read the metrics of the three files and the events of the resumed run."""
    events = list(_lines(resumed / "events.jsonl"))
    (loaded,) = [event["step"] for event in events if event["event"] == "loaded"]
    return Runs(
        straight=_losses(straight / "metrics.jsonl"),
        killed=_losses(killed),
        resumed=_losses(resumed / "metrics.jsonl"),
        saved=tuple(event["step"] for event in events if event["event"] == "committed"),
        loaded=loaded,
    )


def check(runs: Runs) -> None:
    """Exit with an error unless the runs have the same loss, bit for bit, at every step that they have."""
    for name, losses in (("killed", runs.killed), ("resumed", runs.resumed)):
        differ = [step for step, loss in losses.items() if loss != runs.straight.get(step)]
        if differ:
            sys.exit(f"The {name} run's loss differs from the straight run's, first at step {differ[0]}.")
    if runs.resumed.keys() != runs.straight.keys():
        sys.exit("The resumed run and the straight run do not have the same steps.")


def draw(runs: Runs) -> Iterator[str]:
    """Yield the lines of the SVG: the card, the axes, the lost steps, the curves, the two starts."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" font-family="-apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14">'
    )
    title = f"Killed at step {runs.kill}, resumed from step {runs.loaded}: every loss is the same, bit for bit"
    yield f"<title>{escape(title)}</title>"
    # A card of its own colour is legible on a light page and on a dark one.
    yield f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" fill="{CARD}" stroke="{BORDER}"/>'
    yield _text(LEFT - 48, 40, title, size=17, weight="600")
    subtitle = (
        f"Debug model, 804,480 parameters, float32 on CPU, {runs.last} steps; kill -9, then the same command again"
    )
    yield _text(LEFT - 48, 64, subtitle, colour=QUIET)
    yield from _lost_steps(runs)
    yield from _axes(runs)
    yield from _curves(runs)
    yield from _starts(runs)
    yield "</svg>"


def _lost_steps(runs: Runs) -> Iterator[str]:
    """Shade the steps that were trained twice, from the plot down to the second start."""
    left, right = _x(runs, runs.loaded), _x(runs, runs.kill)
    yield f'<rect x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{SECOND_ROW + 9 - TOP}" fill="{LOST}"/>'
    middle = (left + right) / 2
    for line, text in enumerate(("steps", f"{runs.loaded + 1} to {runs.kill}", "trained twice")):
        yield _text(middle, TOP + 20 + 17 * line, text, colour=FIRST, anchor="middle", size=13)


def _axes(runs: Runs) -> Iterator[str]:
    for loss in range(2, _ceiling(runs) + 1):
        y = _y(runs, loss)
        yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield _text(LEFT - 10, y + 5, str(loss), colour=QUIET, anchor="end")
    for step in range(0, runs.last + 1, 20):
        x = _x(runs, step)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 5}" stroke="{QUIET}"/>'
        yield _text(x, BOTTOM + 21, str(step), colour=QUIET, anchor="middle")
    yield f'<line x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}" stroke="{QUIET}"/>'
    yield _text(LEFT - 10, BOTTOM + 21, "step", colour=QUIET, anchor="end")
    middle = (TOP + BOTTOM) / 2
    yield (
        f'<text transform="translate(46 {middle:.0f}) rotate(-90)" text-anchor="middle" fill="{QUIET}">'
        "loss (nats per byte)</text>"
    )


def _curves(runs: Runs) -> Iterator[str]:
    """Draw the three curves over each other, each with its name; the steps that came again are dashed."""
    again = {step: loss for step, loss in runs.resumed.items() if runs.loaded <= step <= runs.kill}
    after = {step: loss for step, loss in runs.resumed.items() if step >= runs.kill}
    yield _curve(runs, runs.straight, STRAIGHT, 10)
    yield _curve(runs, runs.killed, FIRST, 2.4)
    yield _curve(runs, again, SECOND, 2.4, dashes="6 6")
    yield _curve(runs, after, SECOND, 2.4)
    step = min(12, runs.kill)
    yield _text(_x(runs, step) + 14, _y(runs, runs.straight[step]) - 4, "first start", colour=FIRST, weight="600")
    highest = max(loss for step, loss in after.items() if step <= runs.kill + 20)
    yield _text(_x(runs, runs.kill + 3), _y(runs, highest) - 14, "second start", colour=SECOND, weight="600")
    step = max(1, runs.last - 12)
    x, top, end = _x(runs, step), _y(runs, 4.2), _y(runs, runs.straight[step]) - 8
    yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top:.1f}" y2="{end:.1f}" stroke="{QUIET}"/>'
    yield _text(RIGHT, top - 26, "wide grey line:", colour=QUIET, anchor="end")
    yield _text(RIGHT, top - 8, "the same run, never interrupted", colour=QUIET, anchor="end")


def _starts(runs: Runs) -> Iterator[str]:
    """Draw a row for each start: where it began and ended, and its saves."""
    rows = ((FIRST_ROW, 0, runs.kill, FIRST), (SECOND_ROW, runs.loaded, runs.last, SECOND))
    for y, begin, end, colour in rows:
        yield (
            f'<line x1="{_x(runs, begin):.1f}" x2="{_x(runs, end):.1f}" y1="{y}" y2="{y}" stroke="{colour}"'
            ' stroke-width="3"/>'
        )
    for step in runs.saved:
        y, colour = (FIRST_ROW, FIRST) if step <= runs.loaded else (SECOND_ROW, SECOND)
        yield f'<circle cx="{_x(runs, step):.1f}" cy="{y}" r="6" fill="{CARD}" stroke="{colour}" stroke-width="2.5"/>'
    x, y = _x(runs, runs.kill), FIRST_ROW
    yield f'<path d="M{x - 7:.1f} {y - 7}l14 14m0 -14l-14 14" stroke="{FIRST}" stroke-width="3.5"/>'
    yield _text(x + 16, y + 5, f"kill -9 after step {runs.kill}", colour=FIRST, weight="600")
    x, y = _x(runs, runs.loaded), SECOND_ROW
    yield f'<path d="M{x:.1f} {FIRST_ROW + 7}V{y}" stroke="{SECOND}" stroke-width="2" stroke-dasharray="3 3"/>'
    yield f'<circle cx="{x:.1f}" cy="{y}" r="4" fill="{SECOND}"/>'
    yield _text(x - 14, y + 5, f"resumes from step {runs.loaded}", colour=SECOND, anchor="end", weight="600")
    yield f'<circle cx="{LEFT + 6}" cy="{SECOND_ROW + 40}" r="6" fill="{CARD}" stroke="{QUIET}" stroke-width="2.5"/>'
    yield _text(LEFT + 20, SECOND_ROW + 45, "a complete checkpoint on disk", colour=QUIET)


def _curve(runs: Runs, losses: Mapping[int, float], colour: str, width: float, *, dashes: str = "none") -> str:
    points = " ".join(f"{_x(runs, step):.1f},{_y(runs, loss):.1f}" for step, loss in losses.items())
    return (
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"'
        f' stroke-dasharray="{dashes}"/>'
    )


def _text(
    x: float, y: float, text: str, *, colour: str = INK, anchor: str = "start", size: int = 14, weight: str = "400"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-size="{size}"'
        f' font-weight="{weight}">{escape(text)}</text>'
    )


def _x(runs: Runs, step: float) -> float:
    return LEFT + (RIGHT - LEFT) * step / runs.last


def _y(runs: Runs, loss: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * (loss - 2) / (_ceiling(runs) - 2)


def _ceiling(runs: Runs) -> int:
    return int(max(runs.straight.values())) + 1


def _losses(path: Path) -> dict[int, float]:
    return {line["step"]: line[LOSS] for line in _lines(path)}


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


if __name__ == "__main__":
    main()
