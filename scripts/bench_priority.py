"""Measure steps of training during saves while other processes keep the cores busy, in one or two versions.

    python scripts/bench_priority.py --hogs 2 4 8 --pairs 5
    python scripts/bench_priority.py --hogs 0 --params 20 --pairs 5 --against ../older-checkout

A pair is one process that trains with saves and without, in random order, next to `--hogs` processes of normal priority
that spin. Each round measures a pair of every number of hogs, mode and version, in a new order. A step is everything
between two saves that are due; of the time in `save` itself it has only what a call costs that saves nothing. It is
during a save if it began before the commit. Figures are medians over the pairs, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MODES = ("disabled", "async", "async_with_pinned_mem")
STALL_SECONDS = 1.0
"""A step as long as this is a stall."""
DEADLINE_SECONDS = 300
"""Of one pair."""
NETWORK_PARAMS = 8 * (64 * 64 + 64)
"""What is trained by products of matrices, 0.4 MB of state; more parameters have a constant gradient."""
HOG = "import os\nwhile os.getppid() == {parent}:\n    for _ in range(100_000): pass"


class Cell(NamedTuple):
    """What a pair is of."""

    hogs: int
    mode: str
    version: str


@dataclass(frozen=True)
class Pair:
    """What one process measured, in seconds."""

    longest: float
    """Step after a save returned, of the half with saves."""
    longest_without: float
    """Step of the half without saves."""
    during: float
    """Median step that began before the commit of the save before it; 0 if there was none."""
    without: float
    """Median step of the half without saves."""
    background: float
    """Median time from the return of `save` to the commit."""

    @property
    def ratio(self) -> float:
        return self.longest / self.longest_without

    @property
    def slowdown(self) -> float:
        """Of a step during a save; by steps of the same process, because a machine drifts from one to the next."""
        return self.during / self.without

    @property
    def is_stalled(self) -> bool:
        """Whether a step during a save was a stall, and none without was."""
        return self.longest > STALL_SECONDS >= self.longest_without


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--hogs", type=int, nargs="+", default=[0, 2, 4, 8], help="processes that spin (default: all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--params", type=float, default=0.0, help="millions of parameters (default: 0.4 MB of state)")
    parser.add_argument("--saves", type=int, default=5, help="of the half with saves")
    parser.add_argument("--steps", type=int, default=12, help="that are measured after each save")
    parser.add_argument("--work", type=int, default=8, help="forward and backward passes of a step")
    parser.add_argument("--seed", type=int, default=0, help="of all orders")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--against", type=Path, help="another checkout, which is measured in the same rounds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _train(**json.loads(args.child))
        return 0
    versions = {"this": ROOT} | ({"other": args.against.resolve()} if args.against else {})
    cells = [Cell(hogs, mode, name) for hogs in args.hogs for mode in args.modes for name in versions]
    found: dict[Cell, list[Pair]] = defaultdict(list)
    for number in range(args.pairs):
        order = random.Random(args.seed + number)
        for cell in order.sample(cells, len(cells)):
            found[cell].append(_measured(versions[cell.version], cell, order.random() < 0.5, args))
            pair = found[cell][-1]
            print(
                f"round {number}, {cell.hogs} hogs, {cell.mode}, {cell.version}: longest step"
                f" {pair.longest:.3f} s, without a save {pair.longest_without:.3f} s; median {pair.during:.4f} s during"
                f" a save, {pair.without:.4f} s without; save {pair.background:.3f} s",
                file=sys.stderr,
            )
    print("\n".join([*_longest_lines(found), "", *_during_lines(found)]))
    return 0


def _longest_lines(found: dict[Cell, list[Pair]]) -> Iterator[str]:
    yield f"{'longest step, s':>50}{'ratio':>9}{'over 1 s':>20}"
    yield f"{'hogs mode':28}{'version':8}{'with':>6}{'without':>8}{'':20}{'of pairs':>9}"
    for cell, pairs in sorted(found.items()):
        longest = statistics.median(pair.longest for pair in pairs)
        without = statistics.median(pair.longest_without for pair in pairs)
        ratio = _figure([pair.ratio for pair in pairs])
        stalled = sum(pair.is_stalled for pair in pairs)
        yield f"{_name(cell)}{longest:7.3f}{without:8.3f}{ratio:>20}{stalled:4} of {len(pairs)}"


def _during_lines(found: dict[Cell, list[Pair]]) -> Iterator[str]:
    yield f"{'hogs mode':28}{'version':8}{'step during, s':>14}{'/ without a save':>20}{'save, s':>9}"
    for cell, pairs in sorted(found.items()):
        if cell.mode == "disabled":
            continue  # Its saves are over when they return.
        during = statistics.median(pair.during for pair in pairs)
        slower = _figure([pair.slowdown for pair in pairs])
        background = statistics.median(pair.background for pair in pairs)
        yield f"{_name(cell)}{during:15.4f}{slower:>20}{background:9.3f}"
        others = found.get(cell._replace(version="other"), ())
        if cell.version == "this" and others:
            both = list(zip(pairs, others, strict=True))
            steps = _figure([ours.during / other.during for ours, other in both])
            slower = _figure([ours.slowdown / other.slowdown for ours, other in both])
            saves = _figure([ours.background / other.background for ours, other in both])
            yield f"{'':5}this / other: step during {steps}, save {saves},"
            yield f"{'':19}step during / without a save {slower}"


def _name(cell: Cell) -> str:
    return f"{cell.hogs:4} {cell.mode:23}{cell.version:7}"


def _figure(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def _measured(root: Path, cell: Cell, saves_first: bool, args: argparse.Namespace) -> Pair:
    """Measure one pair. The process imports and sets up first; then the hogs start."""
    job = {
        "mode": cell.mode,
        "params": int(args.params * 1e6),
        "saves": args.saves,
        "steps": args.steps,
        "work": args.work,
        "saves_first": saves_first,
    }
    with tempfile.TemporaryDirectory(dir=args.folder.absolute()) as folder:
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(job | {"folder": folder})],
            env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert child.stdout is not None
            child.stdout.readline()
            with _hogs(cell.hogs):
                output, _ = child.communicate("go\n", DEADLINE_SECONDS)
            if child.returncode:
                sys.exit("a pair failed; see above")
        finally:
            child.kill()
            child.wait()
    return Pair(**json.loads(output))


@contextlib.contextmanager
def _hogs(num: int) -> Iterator[None]:
    """Let that many processes spin. Each one ends with this process."""
    code = HOG.format(parent=os.getpid())
    hogs = [subprocess.Popen([sys.executable, "-S", "-c", code]) for _ in range(num)]
    try:
        yield
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


def _train(folder: str, mode: str, params: int, saves: int, steps: int, work: int, saves_first: bool) -> None:
    """Train both halves of a pair, and print what they took."""
    from torchtitan_lite.checkpoint import CheckpointManager

    model, optimizer, train_step = _training(params, work)
    started: dict[int, float] = {}
    committed: dict[int, float] = {}

    def note(event: str, step: int, **figures: Any) -> None:
        if event == "save_started":
            started[step] = time.monotonic()
        elif event == "committed":  # It comes with a later step, and says how long the save took.
            committed[step] = started[step] + figures["seconds"]

    with CheckpointManager.for_loop(
        model=model,
        optimizer=optimizer,
        folder=Path(folder, "checkpoint"),
        async_mode=mode,
        interval=10**9,
        keep_latest_k=2,
        on_event=note,
    ) as manager:
        manager.load()
        manager.reset()
        loop = _Loop(manager, train_step)
        loop.half(1, steps, is_saved=False)
        print("ready", flush=True)
        sys.stdin.readline()
        halves = {is_saved: loop.half(saves, steps, is_saved) for is_saved in (saves_first, not saves_first)}
        manager.save(loop.step + 1, force=True)  # The run is finished, so no process keeps a copy of it.
    with_saves, without = halves[True], [took for of_save in halves[False] for _, took in of_save.measured]
    during = [
        took for of_save in with_saves for began, took in of_save.measured if began < committed[of_save.step]
    ]  # A synchronous save is committed before it returns.
    pair = Pair(
        longest=max(took for of_save in with_saves for _, took in of_save.measured),
        longest_without=max(without),
        during=statistics.median(during or [0.0]),
        without=statistics.median(without),
        background=statistics.median(committed[of_save.step] - of_save.returned for of_save in with_saves),
    )
    print(json.dumps(asdict(pair)))


class _AfterSave(NamedTuple):
    step: int
    returned: float
    measured: list[tuple[float, float]]
    """When each step began, and how long it took."""


class _Loop:
    """The training loop of both halves, which counts its steps."""

    def __init__(self, manager: Any, train_step: Callable[[], None]) -> None:
        self._manager = manager
        self._train_step = train_step
        self.step = 0

    def half(self, saves: int, steps: int, is_saved: bool) -> list[_AfterSave]:
        """Train `saves` times a step that is saved, or would be, and `steps` after it; end with no save in flight."""
        found = []
        for _ in range(saves):
            self._one(is_saved)
            returned, measured = time.monotonic(), []
            of_step = self.step
            for _ in range(steps):
                began = time.monotonic()
                self._one(False)
                measured.append((began, time.monotonic() - began))
            found.append(_AfterSave(of_step, returned, measured))
        self._manager.wait()
        return found

    def _one(self, is_saved: bool) -> None:
        self.step += 1
        self._train_step()
        self._manager.save(self.step, now=is_saved)


def _training(params: int, work: int) -> tuple[Any, Any, Callable[[], None]]:
    """Return a model, its optimizer and a step of fixed work: passes of a small network with Python between."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = torch.nn.Sequential(*[part for _ in range(8) for part in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
    more = max(0, params - NETWORK_PARAMS)
    num = -(-more // 1_000_000)
    table = torch.nn.ParameterList([torch.randn(more // num) for _ in range(num)])
    model = torch.nn.ModuleDict({"network": network, "table": table})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(64, 64)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for _ in range(work):
            network(batch).square().mean().backward()
            sum(number * number for number in range(2_000))
        for each in table:
            each.grad = torch.full_like(each, 1e-3) if each.grad is None else each.grad.fill_(1e-3)
        optimizer.step()

    return model, optimizer, step


if __name__ == "__main__":
    sys.exit(main())
