"""The targets, and which of them were reached.

Each is a ratio of two figures of one run, computed for each round, or a single figure. A target that was not measured
on this machine or in this run is neither reached nor missed, and reported as not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from checkpoint_bench.apart import SYNC
from checkpoint_bench.in_turn import MEMCPY
from checkpoint_bench.samples import Samples, spread

Figures = Callable[[Samples], list[float]]

MIB = 1 << 20
_ASYNC = ("thread", "process", "manager")


@dataclass(frozen=True)
class Target:
    """One line of the table."""

    name: str
    at_most: float | None
    at_least: float | None
    figures: Figures | None
    """Compute the reached values; None: another script measures them."""
    elsewhere: str = ""
    """Who measures it, if not this script."""
    unit: str = ""
    scale: float = 1.0
    """Divisor of the figures for the table."""
    raw_figure: str = ""
    """The raw disk's figure in the ratio: its speed on the day of the run belongs next to the ratio."""

    def bound(self) -> str:
        """Return the bound as text."""
        sign, value = ("<=", self.at_most) if self.at_most is not None else (">=", self.at_least)
        return f"{sign} {value:g}{self.unit}"

    def judge(self, samples: Samples) -> dict[str, Any]:
        """Return the line of the table as plain values."""
        values = self.figures(samples) if self.figures is not None else []
        line: dict[str, Any] = {"name": self.name, "target": self.bound(), "unit": self.unit, "count": len(values)}
        if not values:
            return line | {"reached": None, "verdict": self.elsewhere or "not measured in this run"}
        median, low, high = (value / self.scale for value in spread(values))
        holds = median <= self.at_most if self.at_most is not None else median >= (self.at_least or 0.0)
        line |= {"reached": median, "low": low, "high": high, "verdict": "reached" if holds else "missed"}
        raw = ("llama", "raw", "file_bytes"), ("llama", "raw", self.raw_figure)
        if self.raw_figure and (speeds := samples.ratios(*raw)):
            line["raw_gb_per_second"] = spread(speeds)[0] / 1e9
        return line


def all_targets() -> list[Target]:
    """Return every target in the order of the table."""
    return [*_saves(), *_loads(), *_memory(), *_background(), *_small(), *_digests(), *_ranks(), *_scale()]


def judged(samples: Samples, elsewhere: dict[str, float] | None = None) -> list[dict[str, Any]]:
    """Return every line with its reached value; `elsewhere` has figures of other scripts, by target name."""
    lines = []
    for target in all_targets():
        given = (elsewhere or {}).get(target.name)
        if given is not None:
            target = dataclasses.replace(target, figures=_given(given))
        lines.append(target.judge(samples))
    return lines


def _ratio(workload: str, above: tuple[str, str], below: tuple[str, str]) -> Figures:
    return lambda samples: samples.ratios((workload, *above), (workload, *below))


def _figure(workload: str, contender: str, figure: str) -> Figures:
    return lambda samples: list(samples.by_round(workload, contender, figure).values())


def _given(value: float) -> Figures:
    return lambda samples: [value]


def _at_most(name: str, bound: float, figures: Figures, **more: Any) -> Target:
    return Target(name, bound, None, figures, **more)


def _at_least(name: str, bound: float, figures: Figures) -> Target:
    return Target(name, None, bound, figures)


def _saves() -> list[Target]:
    ours, dcp, raw = ("ours", "save_seconds"), ("dcp", "save_seconds"), ("raw", "save_seconds")
    return [
        _at_most("durable save / raw direct write", 1.1, _ratio("llama", ours, raw), raw_figure="save_seconds"),
        _at_least("dcp.save / our durable save", 5.5, _ratio("llama", dcp, ours)),
        _at_least("dcp.save / our durable save, an eighth", 3, _ratio("llama/8", dcp, ours)),
    ]


def _loads() -> list[Target]:
    warm, cold = "warm_load_seconds", "cold_load_seconds"
    return [
        _at_most("warm load / raw warm read", 1.2, _ratio("llama", ("ours", warm), ("raw", warm)), raw_figure=warm),
        _at_least("dcp.load / our load, warm", 5, _ratio("llama", ("dcp", warm), ("ours", warm))),
        _at_most("cold load / raw cold read", 1.1, _ratio("llama", ("ours", cold), ("raw", cold)), raw_figure=cold),
    ]


def _memory() -> list[Target]:
    return [
        _at_most(
            f"extra memory of a {kind}", 64, _figure("llama", "ours", f"{kind}_extra_bytes"), unit=" MiB", scale=MIB
        )
        for kind in ("save", "load")
    ]


def _background() -> list[Target]:
    lines = []
    for mode in _ASYNC:
        ours = f"ours {mode}"
        stall, first, durable = ((ours, f"{name}_seconds") for name in ("stall", "first_stall", "durable"))
        sync = (f"{SYNC} with {ours}", "sync_save_seconds")
        copy = (f"{MEMCPY} with {ours}", "memcpy_seconds")
        lines += [
            _at_most(f"stall / memcpy ({mode})", 1.2, _ratio("llama", stall, copy)),
            _at_most(f"first stall / a later one ({mode})", 1.5, _ratio("llama", first, stall)),
            _at_most(f"time to durable / sync save ({mode})", 1.3, _ratio("llama", durable, sync)),
            _at_most(f"steps during a save / alone ({mode})", 1.10, _figure("llama", ours, "steps_ratio")),
        ]
    return lines


def _small() -> list[Target]:
    save, cold, warm = "save_seconds", "cold_load_seconds", "warm_load_seconds"
    return [
        _at_least("20,000 small: dcp.save / our save", 25, _ratio("small", ("dcp", save), ("ours", save))),
        _at_least("20,000 small: dcp.load / our load, cold", 20, _ratio("small", ("dcp", cold), ("ours", cold))),
        _at_least("20,000 small: dcp.load / our load, warm", 20, _ratio("small", ("dcp", warm), ("ours", warm))),
    ]


def _digests() -> list[Target]:
    figures = {"save": 1.05, "cold_load": 1.05, "warm_load": 1.15}
    return [
        _at_most(
            f"digests on / off, {name.replace('_', ' ')}",
            bound,
            _ratio("llama", ("ours", f"{name}_seconds"), ("ours, no digests", f"{name}_seconds")),
        )
        for name, bound in figures.items()
    ]


def _ranks() -> list[Target]:
    lines = []
    for mesh in ("hsdp", "ddp"):
        written, balance = "written_to_unique_ratio", "max_to_mean_ratio"
        lines += [
            _at_most(f"bytes written / unique bytes ({mesh})", 1.005, _figure(f"{mesh} bytes", "ours", written)),
            _at_most(f"bytes of a rank, max / mean ({mesh})", 1.1, _figure(f"{mesh} bytes", "ours", balance)),
        ]
    return lines


def _scale() -> list[Target]:
    script = "scripts/simulate_scale.py measures it"
    return [
        *(
            Target(f"{what}, {model}, {ranks} ranks", most, None, None, script, unit)
            for what, most, unit in (
                ("CPU of a first plan", 10.0, " s"),
                ("CPU of a repeated plan", 1.0, " s"),
                ("CPU of a load plan", 1.0, " s"),
                ("manifest in MB", 20.0, ""),
            )
            for model in ("8B", "405B")
            for ranks in ("16,384", "100,000")
        ),
        _at_least("tensor digests, one thread, GB/s", 1.0, _figure("digest", "ours", "tensor_digest_gb_per_second")),
    ]
