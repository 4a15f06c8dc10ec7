"""Axes, and numbers as a person, or SVG, reads them. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """A linear axis from `low` to `high`, with its `ticks`."""

    low: float
    high: float
    ticks: tuple[float, ...] = ()

    def at(self, value: float) -> float:
        """Return where `value` is: 0 at the low end, 1 at the high one; a value outside is at the end."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def text(self, tick: float) -> str:
        """Return `tick` with as many digits as it needs to differ from the others."""
        gap = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else abs(tick) or 1.0
        digits = max(0, -math.floor(math.log10(gap) + 1e-9))
        # A gap of 0.25 needs one digit more than 0.2.
        digits += not math.isclose(gap * 10**digits, round(gap * 10**digits), rel_tol=1e-6)
        return f"{tick:,.{digits}f}"


def nice_scale(low: float, high: float, num_ticks: int = 5) -> Scale:
    """Return an axis that has all from `low` to `high`, and ends at ticks."""
    step = nice_step(low, high, num_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    return Scale(first * step, last * step, tuple(index * step for index in range(first, last + 1)))


def exact_scale(low: float, high: float, num_ticks: int = 6) -> Scale:
    """Return an axis from `low` to `high` with round ticks inside it."""
    high = high if high > low else low + 1
    step = max(1.0, nice_step(low, high, num_ticks))
    inside = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Scale(low, high, tuple(index * step for index in inside))


def nice_step(low: float, high: float, num_ticks: int) -> float:
    """Return the distance of about `num_ticks` round ticks: 1, 2, 2.5 or 5 times a power of ten."""
    rough, size = (high - low) / num_ticks, max(abs(low), abs(high))
    if rough < max(1e-9 * size, 1e-12):  # All values are the same, as far as an axis can show.
        rough = max(size / num_ticks, 1e-12) if size else 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1, 2, 2.5, 5, 10) if rough <= factor * power * (1 + 1e-9))


def short_step(step: float) -> str:
    """Return a step for an axis: "250", "20k", "1.5M"."""
    for unit, length in (("M", 1e6), ("k", 1e3)):
        if abs(step) >= 10 * length or (unit == "M" and abs(step) >= length):
            return f"{step / length:.10g}{unit}"
    return f"{step:,.10g}"


def seconds_text(seconds: float) -> str:
    """Return a duration with two units or three digits: "0.052 s", "12.4 s", "3 min 20 s", "5 h 12 min", "3 d 4 h"."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    for length, unit, smaller, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= length:
            rest = int(seconds % length // smaller)
            return f"{int(seconds // length):,} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{seconds:.0f} s"


def rate_text(bytes_per_second: float) -> str:
    """Return a bandwidth: "66.6 MB/s", "1.24 GB/s"."""
    for unit, length in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= length:
            return f"{bytes_per_second / length:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"


def number_text(value: float) -> str:
    """Return a number with four significant digits, and thousands apart."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def moment_text(unix: float) -> str:
    """Return a time in UTC: "2026-11-22 20:37"."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix))
    except (ValueError, OverflowError, OSError):  # The clock of a host may have said anything.
        return "unknown"


def share_text(share: float) -> str:
    """Return a share of 1 in percent: "97.3 %", "0.04 %"."""
    percent = 100 * share
    return f"{percent:.1f} %" if percent >= 1 or percent == 0 else f"{percent:.2g} %"


def percent(share: float) -> str:
    """Return a share of the width as SVG writes it."""
    return f"{pixels(100 * share)}%"


def pixels(value: float, digits: int = 2) -> str:
    """Return a number as short as SVG may have it."""
    written = f"{value:.{digits}f}"
    return written.rstrip("0").rstrip(".")


def line_path(points: Iterable[tuple[float, float]]) -> str:
    """Return the path through `points`."""
    return "".join(f"{'L' if at else 'M'}{pixels(x, 1)} {pixels(y, 1)}" for at, (x, y) in enumerate(points))


def area_path(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]]) -> str:
    """Return the area between two lines."""
    return line_path([*upper, *reversed(lower)]) + "Z" if upper else ""
