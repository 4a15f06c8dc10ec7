"""The page: what the template needs of one or two runs, and the HTML that it makes of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from typing import Any

from torchtitan_lite import __version__
from torchtitan_lite.errors import ExtraMissing
from torchtitan_lite.events import Finished, Preempted
from torchtitan_lite.log import counted, readable_bytes
from torchtitan_lite.report import curves, marks
from torchtitan_lite.report.changes import differences, shown_on_page
from torchtitan_lite.report.lines import TOKENS_PER_SECOND, number_or_nan
from torchtitan_lite.report.run import LABELS, Run
from torchtitan_lite.report.saved_steps import Fate
from torchtitan_lite.report.scales import (
    moment_text,
    number_text,
    percent,
    pixels,
    rate_text,
    seconds_text,
    share_text,
    short_step,
)

MAX_TABLE_ROWS = 200
MAX_START_ROWS = 100


def render_page(runs: Sequence[Run]) -> str:
    """Return the page of one run, or of two side by side. Raises ExtraMissing without jinja2."""
    try:
        import jinja2
    except ImportError as error:
        raise ExtraMissing.of(error, "report", "jinja2") from None

    files = resources.files("torchtitan_lite.report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (files / name).read_text(encoding="utf-8")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "seconds": seconds_text,
        "bytes": readable_bytes,
        "rate": rate_text,
        "moment": moment_text,
        "share": share_text,
        "shown": shown_on_page,
        "grouped": "{:,}".format,
        "step": short_step,
        "percent": percent,
        "pixels": pixels,
    }
    text = environment.get_template("page.html").render(page(runs))
    return text.encode(errors="replace").decode()  # The name of a folder need not be UTF-8.


def page(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the values of the template."""
    x = curves.step_scale(runs)
    spans = [curves.spans_of(run) for run in runs]
    ceiling = max((curves.time_ceiling(found) for found in spans if found), default=1.0)
    best = max((run.best_rate for run in runs if math.isfinite(run.best_rate)), default=math.nan)
    first, second = runs[0], runs[1] if len(runs) > 1 else None
    return {
        "title": " and ".join(run.name for run in runs),
        "runs": [_run_values(index, run, spans[index], x, ceiling, best) for index, run in enumerate(runs)],
        "loss": curves.loss_figure(runs),
        "differences": differences(first.config, second.config) if second is not None else None,
        "labels": LABELS,
        "x": x,
        "heights": {"loss": curves.LOSS_HEIGHT, "time": curves.TIME_HEIGHT},
        "curve_width": curves.CURVE_WIDTH,
        "begun_from": defaultdict(lambda: "fresh", BEGUN_FROM),
        "version": __version__,
        "read_at": max(run.read_at for run in runs),
    }


def _run_values(index: int, run: Run, spans: list[curves.Span], x: Any, ceiling: float, best: float) -> dict[str, Any]:
    changed = {number for number, changes in run.changes.items() if changes}
    return {
        "index": index,
        "run": run,
        "about": _about(run),
        "status": (run.status, STATUS[run.status]),
        "tiles": _tiles(run),
        "step_time": curves.step_time_figure(run, spans, x, ceiling),
        "lanes": marks.lanes_of(run, x),
        "fates": marks.fate_counts(run.saves),
        "rates": marks.rates_of(run, best),
        "impossible_rates": marks.impossible_rates(run),
        "cells": marks.cells_of(run.shards) if run.shards is not None else [],
        "starts": run.starts[-MAX_START_ROWS:],
        "saves": run.saves[-MAX_TABLE_ROWS:],
        "changed": [start for start in run.starts if start.number in changed],
        "sections": _config_by_section(run),
    }


BEGUN_FROM = {"seed": "seed", "initial": "initial weights", "": "none"}
"""What a start that resumed from no step began from: the last one ended before it knew."""
STATUS = {
    Finished.name: "Finished",
    Preempted.name: "Left after a signal",
    "failed": "Failed",
    "killed": "Killed or failed",
    "running": "Running",
    "unknown": "No sign of its end",
}


def _about(run: Run) -> list[str]:
    """Return a few words about the model and its ranks."""
    config = run.config
    words = [shown_on_page(config["job.description"])] if config.get("job.description") else []
    if config.get("model.name"):
        words.append(f"{config['model.name']} {config.get('model.flavor') or ''}".strip())
    if run.shards is not None:
        num = len(run.shards.ranks)
        words.append(counted(num, "rank"))
    topology = next((start.topology for start in reversed(run.starts) if start.topology), "")
    if topology:
        words.append(topology)
    if run.starts:
        words.append(f"{moment_text(run.starts[0].began)} to {moment_text(run.starts[-1].last_sign)} UTC")
    return words


def _tiles(run: Run) -> list[dict[str, Any]]:
    """Return the figures at the top: a label, the text, the value in full, and a line below."""
    logged, starts, committed = run.logged, run.starts, run.committed
    last_logged = logged.steps[-1] if len(logged) else None
    of_all = f"of {run.total_steps:,}" if run.total_steps else ""
    tiles = [_tile("Step", f"{run.last_step:,}", run.last_step, of_all)]
    if last_logged is not None:
        tiles.append(_tile("Loss", number_text(logged.loss[-1]), logged.loss[-1], f"at step {last_logged:,}"))
    if run.parts:
        note = f"of {seconds_text(sum(run.parts.values()))}"
        tiles.append(_tile("Goodput", share_text(run.goodput), run.goodput, note))
    if math.isfinite(speed := number_or_nan(logged.last.get(TOKENS_PER_SECOND))):
        tiles.append(_tile("Tokens a second", number_text(speed), speed, "each rank"))
    if committed:
        # The ledger's is also that of saves that failed or were cut, and of waiting for the last one at the end.
        blocked = run.parts.get("saving") or sum(save.stall_seconds or 0.0 for save in committed)
        tiles.append(_tile("Blocked by saves", seconds_text(blocked), blocked, f"in {counted(len(committed), 'save')}"))
    if starts:
        ended = sum(start.end in ("killed", "failed") for start in starts)
        note = f"{ended} killed or failed" if ended else "none killed"
        tiles.append(_tile("Starts", f"{len(starts):,}", len(starts), note))
    if run.saves:
        kept = [save.nbytes or 0 for save in run.saves if save.fate is Fate.KEPT]
        tiles.append(_tile("Checkpoints", f"{len(kept):,}", len(kept), f"{readable_bytes(sum(kept))} on disk"))
    if run.uploaded is not None:
        step, ago = run.uploaded.event.step, seconds_text(max(0.0, run.read_at - run.uploaded.time))
        tiles.append(_tile("Uploaded", f"{step:,}", step, f"the last step, {ago} ago"))
    return tiles


def _tile(label: str, text: str, value: float, note: str) -> dict[str, Any]:
    return {"label": label, "text": text, "value": value, "note": note, "key": label.lower().replace(" ", "-")}


def _config_by_section(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the configuration as the page lists it: by section."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, value in run.config.items():
        section, _, key = name.partition(".")
        sections.setdefault(section, []).append((key or section, shown_on_page(value)))
    return list(sections.items())
