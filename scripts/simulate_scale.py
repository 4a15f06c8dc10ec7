"""Compute what a save and a load cost the coordinator and a rank, at up to 16,384 ranks, without the ranks.

    python scripts/simulate_scale.py --quick
    python scripts/simulate_scale.py --json scale.json

The plans of all ranks are made by arithmetic (scale_simulation/plans.py), and run through the functions that plan,
describe and read, of stock DCP and of ours (scale_simulation/costs.py). If a complete state is too much, a few tensors
of each kind are planned for all ranks and the cost of the rest is extrapolated: a line marked x. Such a line is a lower
bound, because that many objects would not fit into memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scale_simulation.costs import Figures, num_bytes, our_load, our_repeated_seconds, ours, stock
from scale_simulation.plans import Mesh, Planned, mesh_of, state_of
from scale_simulation.tables import is_known

from torchtitan_lite.checkpoint.format.torch_item import tensor_frame

KINDS = ("matrix", "vector", "number", "own")
POINTS = [
    *(("8B", "fsdp", ranks) for ranks in (8, 128, 1024, 16384)),
    *(("8B", layout, 1024) for layout in ("hsdp", "tp")),
    *(("70B", "fsdp", ranks) for ranks in (1024, 16384)),
    *(("405B", "fsdp", ranks) for ranks in (128, 1024, 16384)),
    ("405B", "tp", 16384),
]
QUICK_POINTS = [("debugmodel", "fsdp", 8), ("debugmodel", "hsdp", 16), ("debugmodel", "tp", 64)]
TARGET_RANKS = 16384

Cost = Callable[[Sequence[Planned], Mesh], Figures]


@dataclass(frozen=True)
class Line:
    """The cost of one planner for one state on a number of ranks."""

    model: str
    layout: str
    ranks: int
    planner: str
    tensors: int
    items: int
    """Chunks that all ranks together write."""
    is_extrapolated: bool
    """Whether the cost is extrapolated from some of the tensors."""
    figures: Figures


def main() -> int:
    """Run the command. Return 0."""
    args = _arguments().parse_args()
    warnings.filterwarnings("ignore")
    points = QUICK_POINTS if args.quick else POINTS
    budget = 2_000 if args.quick else args.items
    lines: list[Line] = []
    own: dict[str, dict[int, Figures]] = {"dcp": {}, "ours": {}}
    for model, layout, ranks in points:
        print(f"  {model} {layout} {ranks}", file=sys.stderr, flush=True)
        lines += measure(model, layout, ranks, budget, own, args.only)
    print(table(lines))
    if args.json:
        Path(args.json).write_text(json.dumps(_document(lines, budget), indent=1) + "\n", encoding="utf-8")
    return 0


def measure(
    model: str, layout: str, ranks: int, budget: int, own: dict[str, dict[int, Figures]], only: Sequence[str]
) -> list[Line]:
    """Return the lines of one state for the planners `only`, with at most about `budget` items a kind of tensor."""
    state, mesh = state_of(model), mesh_of(layout, ranks)
    all_bytes = num_bytes(state)
    planners: dict[str, Cost] = {"dcp": stock, "ours": lambda tensors, mesh: ours(tensors, mesh, all_bytes)}
    for tensor in state[:16]:
        tensor_frame(torch.float32, tensor.shape)
    lines = []
    for name in only:
        cost = planners[name]
        is_extrapolated = len(state) * ranks > budget
        figures = _extrapolated(state, mesh, cost, budget, own[name]) if is_extrapolated else cost(state, mesh)
        if name == "ours":
            if is_extrapolated and is_known(mesh):
                figures |= our_load(state, mesh, all_bytes)
            figures["cached_coordinator_seconds"] = our_repeated_seconds(mesh, all_bytes, figures["table_bytes"])
        lines.append(Line(model, layout, ranks, name, len(state), len(state) * ranks, is_extrapolated, figures))
    return lines


def table(lines: Iterable[Line]) -> str:
    """Return the lines as a text of 80 columns."""
    heads = ("first s", "again s", "gathered", "again", "metadata", "load s")
    rows = [f"{'model':<5} {'layout':<6} {'ranks':>6} {'':<5}" + "".join(f"{head:>9}" for head in heads), "-" * 80]
    for line in lines:
        f = line.figures
        described = f["metadata_bytes"] + f.get("manifest_bytes", 0)
        cells = (
            _seconds(f["first_coordinator_seconds"]),
            _seconds(f["cached_coordinator_seconds"]),
            _bytes(f["first_gathered_bytes"] + f["results_gathered_bytes"]),
            _bytes(f["results_gathered_bytes"]),
            _bytes(described),
            _seconds(f["load_planning_seconds"]),
        )
        who = f"{line.planner}{' x' if line.is_extrapolated else ''}"
        rows.append(
            f"{line.model[:5]:<5} {line.layout:<6} {line.ranks:>6} {who:<6}"[:26].ljust(26)
            + f"{cells[0]:>7}"
            + "".join(f"{cell:>9}" for cell in cells[1:])
        )
    return "\n".join(
        [
            *rows,
            "first: the coordinator's CPU seconds at a first save; again: at a repeated one,",
            "with a cached plan (dcp: enable_plan_caching; without it a repeated one is a",
            "first one); gathered: bytes that ranks send to it, at a first save and again;",
            "metadata: .metadata, and manifest.json with ours; load: a rank's CPU seconds.",
            "x: extrapolated from some tensors of each kind, planned for all ranks.",
        ]
    )


def targets(lines: Iterable[Line]) -> dict[str, float]:
    """Return figures for the targets of scripts/bench_checkpoint.py, by the name of the target."""
    found: dict[str, float] = {}
    for line in lines:
        if (line.planner, line.layout, line.ranks) == ("ours", "fsdp", TARGET_RANKS):
            where = f"{line.model}, 16,384 ranks"
            found[f"CPU of a repeated plan, {where}"] = line.figures["cached_coordinator_seconds"]
            found[f"CPU of a load plan, {where}"] = line.figures["load_planning_seconds"]
    return found


def _extrapolated(state: Sequence[Planned], mesh: Mesh, cost: Cost, budget: int, own: dict[int, Figures]) -> Figures:
    """Return the cost of `state`: that of two tensors, plus for each kind the extrapolated cost of its tensors.

    The generators of each rank cost the same for every model: `own` caches that cost by the number of ranks.
    """
    # The first item of a plan has extra costs, and so has the first one that several ranks hold: so the base has both,
    # and their tensors are not counted again.
    opening = [next(tensor for tensor in state if tensor.kind == kind) for kind in ("matrix", "number")]
    base = cost(opening, mesh)
    total = dict(base)
    for kind in KINDS:
        others = [tensor for tensor in state if tensor.kind == kind and tensor not in opening]
        if kind == "own" and mesh.size in own:
            added = own[mesh.size]
        else:
            sample = _spread_out(others, max(1, budget // len(KINDS) // mesh.size))
            found = cost([*opening, *sample], mesh)
            # More tensors never cost less: a figure below the base is noise of the clock.
            added = {name: max(0.0, found[name] - base[name]) * len(others) / len(sample) for name in base}
        if kind == "own":
            own[mesh.size] = added
        for name, value in added.items():
            total[name] += value
    return total


def _spread_out(tensors: Sequence[Planned], count: int) -> list[Planned]:
    """Return at most `count` of `tensors`, from all parts of the model."""
    if count >= len(tensors):
        return list(tensors)
    return [tensors[(2 * number + 1) * len(tensors) // (2 * count)] for number in range(count)]


def _document(lines: Sequence[Line], budget: int) -> dict[str, Any]:
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": ["python", *sys.argv],
        "machine": {"processor": platform.machine(), "python": platform.python_version(), "torch": torch.__version__},
        "items_budget": budget,
        "lines": [dataclasses.asdict(line) for line in lines],
        "targets": targets(lines),
    }


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB" if value < 1000 else f"{value:.0f} GB"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small points, to test that it runs")
    parser.add_argument("--items", type=int, default=24_000, help="chunks to plan for a point; 24000")
    parser.add_argument("--only", nargs="+", choices=("dcp", "ours"), default=["dcp", "ours"], help="default: both")
    parser.add_argument("--json", help="file for all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
