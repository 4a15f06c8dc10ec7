"""Compute what a save and a load cost the coordinator and a rank, at up to 100,000 ranks, without the ranks.

    python scripts/simulate_scale.py --quick
    python scripts/simulate_scale.py --json scale.json

The states of all ranks are made by arithmetic (scale_simulation/plans.py), and run through the functions that plan,
describe and read, of stock DCP and of ours (scale_simulation/costs.py). Where a complete state is too much for stock
DCP, a few tensors of each kind are planned for all ranks and the cost of the rest is extrapolated: such figures are
orders of magnitude, and a lower bound, because that many objects would not fit into memory.
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
from scale_simulation.costs import Figures, ours, stock
from scale_simulation.plans import LAYOUTS, Mesh, Planned, mesh_of, state_of

from torchtitan_lite.checkpoint.format.torch_item import tensor_frame

KINDS = ("matrix", "vector", "expert", "number", "own")
POINTS = [
    *(("8B", "fsdp", ranks) for ranks in (8, 128, 1024)),
    *((model, layout, ranks) for model in ("8B", "70B", "405B") for layout in LAYOUTS for ranks in (16384, 100_000)),
]
QUICK_POINTS = [("debugmodel", "fsdp", 8), ("debugmodel", "hsdp", 16), ("debugmodel", "pp_tp", 512)]
MOST_RANKS_OF_DCP = 20_000
"""With more ranks even a few tensors of each kind are too many for stock DCP."""

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
    mesh = mesh_of(layout, ranks)
    state = state_of(model, mesh)
    planners: dict[str, Cost] = {"dcp": stock, "ours": ours}
    for tensor in state[:16]:
        tensor_frame(torch.float32, tensor.shape)
    lines = []
    for name in only:
        if name == "dcp" and mesh.size > MOST_RANKS_OF_DCP:
            continue
        is_extrapolated = name == "dcp" and len(state) * mesh.size > budget
        cost = planners[name]
        figures = _extrapolated(state, mesh, cost, budget, own[name]) if is_extrapolated else cost(state, mesh)
        lines.append(Line(model, layout, mesh.size, name, len(state), len(state) * mesh.size, is_extrapolated, figures))
    return lines


def table(lines: Iterable[Line]) -> str:
    """Return the lines as a text of 80 columns."""
    heads = ("first s", "again s", "sent", "again", "manif.", "meta.", "load s")
    rows = [f"{'':<5} {'':<6} {'ranks':>6} {'':<4}" + "".join(f"{head:>8}" for head in heads), "-" * 80]
    for line in lines:
        f, is_rough = line.figures, line.is_extrapolated
        cells = (
            _seconds(f["first_coordinator_seconds"], is_rough),
            _seconds(f["cached_coordinator_seconds"], is_rough),
            _bytes(f["first_gathered_bytes"] + f["results_gathered_bytes"], is_rough),
            _bytes(f["results_gathered_bytes"], is_rough),
            _bytes(f.get("manifest_bytes", 0), is_rough),
            _bytes(f["metadata_bytes"], is_rough),
            _seconds(f["load_planning_seconds"], is_rough),
        )
        who = f"{line.model[:5]:<5} {line.layout:<6} {line.ranks:>6} {line.planner:<4}"
        rows.append(who + "".join(f"{cell:>8}" for cell in cells))
    return "\n".join(
        [
            *rows,
            "first: the coordinator's CPU seconds at a first save; again: at a repeated one,",
            "with a cached plan (dcp: enable_plan_caching; without it a repeated one is a",
            "first one); sent: bytes that ranks send to it, at a first save and again;",
            "manif.: manifest.json; meta.: .metadata, -: none; load: a rank's CPU seconds",
            "before its first read; ~: an order of magnitude, of some tensors of each kind.",
        ]
    )


def targets(lines: Iterable[Line]) -> dict[str, float]:
    """Return figures for the targets of scripts/bench_checkpoint.py, by the name of the target: the worst layout's."""
    found: dict[str, float] = {}
    for line in lines:
        if line.planner != "ours" or line.ranks < 16_000:
            continue
        where = f"{line.model}, {'16,384' if line.ranks <= MOST_RANKS_OF_DCP else '100,000'} ranks"
        figures = {
            f"CPU of a first plan, {where}": line.figures["first_coordinator_seconds"],
            f"CPU of a repeated plan, {where}": line.figures["cached_coordinator_seconds"],
            f"CPU of a load plan, {where}": line.figures["load_planning_seconds"],
            f"manifest in MB, {where}": line.figures["manifest_bytes"] / 1e6,
        }
        for name, figure in figures.items():
            found[name] = max(figure, found.get(name, 0.0))
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
        if not others:
            continue
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


def _seconds(value: float, is_rough: bool) -> str:
    if is_rough:
        return f"~{float(f'{value:.0e}'):g}"
    return f"{value:.3f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _bytes(value: float, is_rough: bool) -> str:
    if not value:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"~{float(f'{value:.0e}'):g}{unit}" if is_rough else f"{value:.3g}{unit}"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few small points, to test that it runs")
    parser.add_argument("--items", type=int, default=24_000, help="chunks to plan for a point; 24000")
    parser.add_argument("--only", nargs="+", choices=("dcp", "ours"), default=["dcp", "ours"], help="default: both")
    parser.add_argument("--json", help="file for all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
