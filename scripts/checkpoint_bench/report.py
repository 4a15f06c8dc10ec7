"""Figures as tables of at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from checkpoint_bench.samples import Line, Samples

WIDTH = 80

_COLUMNS = {
    "save_seconds": "save s",
    "cold_load_seconds": "cold s",
    "warm_load_seconds": "warm s",
    "save_cpu_seconds": "save cpu",
    "save_extra_bytes": "save MiB",
    "load_extra_bytes": "load MiB",
}
_ASYNC_COLUMNS = {
    "first_stall_seconds": "first s",
    "stall_seconds": "stall s",
    "durable_seconds": "durable",
    "save_cpu_seconds": "cpu s",
    "steps_ratio": "x steps",
}

_NOTES = (
    "Below a figure: the distances of the lowest and the highest value. MiB: peak memory of a save or a load in "
    "addition to the state, pages of mapped files included (torch.save, safetensors). x steps: seconds of a training "
    "step during a save divided by those without a save, medians."
)


def tables(samples: Samples, syncs: dict[str, str]) -> str:
    """Return a table for each workload and one for its background saves, with a note about who syncs."""
    parts = []
    for workload in dict.fromkeys(sample.workload for sample in samples.all):
        lines = [line for line in samples.lines() if line.workload == workload]
        names = dict.fromkeys(line.contender for line in lines)
        background = [name for name in names if _has(lines, name, "stall_seconds")]
        waiting = [name for name in names if _has(lines, name, "save_seconds")]
        if waiting:
            parts.append(table(f"{workload}: while the caller waits", lines, waiting, _COLUMNS, "save_seconds"))
        if background:
            parts.append(table(f"{workload}: in the background", lines, background, _ASYNC_COLUMNS, "stall_seconds"))
        others = [line for line in lines if line.contender not in {*waiting, *background}]
        others += [line for line in lines if line.figure.endswith("_ratio") and line.figure not in _ASYNC_COLUMNS]
        if others:
            parts.append(_others(workload, list(dict.fromkeys(others))))
    return "\n\n".join([*parts, _who_syncs(syncs)])


def targets(lines: Iterable[dict[str, Any]]) -> str:
    """Return the table of targets. Below a value are its lowest and highest round, and the number of rounds."""
    rows = [f"{'target':<46} {'bound':>9} {'reached':>9}  verdict", "-" * WIDTH]
    for line in lines:
        reached = "-" if line["reached"] is None else _short(line["reached"])
        is_judged = line["reached"] is not None
        rows.append(
            f"{line['name']:<46} {line['target']:>9} {reached:>9}  {line['verdict'] if is_judged else ''}".rstrip()
        )
        if not is_judged:
            rows.append(f"    {line['verdict']}")
        elif line["count"] > 1:
            span = f"{_short(line['low'])} .. {_short(line['high'])}"
            speed = f"  raw disk: {line['raw_gb_per_second']:.2f} GB/s" if "raw_gb_per_second" in line else ""
            rows.append(f"{speed:<44}{span:>22}  ({line['count']} rounds)")
    return "\n".join(rows)


def table(title: str, lines: Sequence[Line], names: Sequence[str], columns: dict[str, str], first: str) -> str:
    """Return a table of `names`, by the median of the figure `first`; below each figure is its spread."""
    rows = [title, f"{'':<25}" + "".join(f"{head:>9}" for head in columns.values()), "-" * WIDTH]
    for name in sorted(names, key=lambda name: _median(lines, name, first) or 0.0):
        rows.append(f"{name[:25]:<25}" + "".join(f"{_cell(lines, name, figure):>9}" for figure in columns))
        rows.append(f"{'':<25}" + "".join(f"{_spread(lines, name, figure):>9}" for figure in columns))
    return "\n".join(row.rstrip() for row in rows if row.strip())


def _others(workload: str, lines: Sequence[Line]) -> str:
    rows = [f"{workload}: other figures", "-" * WIDTH]
    for line in lines:
        spread = _spread(lines, line.contender, line.figure)
        value = _in_unit(line.median, line.figure)
        rows.append(f"{line.contender[:34]:<34} {line.figure[:28]:<28} {value:>7} {spread:>8}".rstrip())
    return "\n".join(rows)


def _who_syncs(syncs: dict[str, str]) -> str:
    rows = ["Who asks the disk to keep what was written, within the time that is measured:"]
    rows += [f"  {name}: {who}"[:WIDTH] for name, who in syncs.items()]
    rows.append(textwrap.fill(_NOTES, WIDTH))
    return "\n".join(rows)


def _has(lines: Sequence[Line], name: str, figure: str) -> bool:
    return _median(lines, name, figure) is not None


def _median(lines: Sequence[Line], name: str, figure: str) -> float | None:
    return next((line.median for line in lines if (line.contender, line.figure) == (name, figure)), None)


def _cell(lines: Sequence[Line], name: str, figure: str) -> str:
    value = _median(lines, name, figure)
    return "-" if value is None else _in_unit(value, figure)


def _spread(lines: Sequence[Line], name: str, figure: str) -> str:
    """Return the differences of the lowest and the highest value from the median, in percent, or `>9x`."""
    line = next((line for line in lines if (line.contender, line.figure) == (name, figure)), None)
    if line is None or line.count < 2 or line.median <= 0:
        return ""
    low, high = (100 * (value / line.median - 1) for value in (line.low, line.high))
    return f"{low:.0f}+{high:.0f}%" if high < 999.5 else f"{low:.0f}+>9x"


def _in_unit(value: float, figure: str) -> str:
    return f"{value / (1 << 20):.0f}" if figure.endswith("_bytes") else _short(value)


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
