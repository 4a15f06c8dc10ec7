"""Measure how long saves block ranks that hold the same parameters, in one or two versions of this project.

    python scripts/bench_ranks.py --rounds 5
    python scripts/bench_ranks.py --rounds 5 --against ../older-checkout

Each round starts two ranks in every mode and version, in a new order. A rank trains a stand-in: products of matrices
between two steps of AdamW over parameters that all ranks hold. Blocked is the time in `save` and in
`maybe_wait_for_staging`: of the first save all of it from the first step on, of the later ones the median. The slowest
rank counts; a figure is the median of the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODES = ("disabled", "async", "async_with_pinned_mem")
DEADLINE_SECONDS = 600
"""Of the ranks of one mode, in one round."""


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--params", type=float, default=168.0, help="millions of parameters (default: 168, 2 GB of state)"
    )
    parser.add_argument("--first", type=int, default=3, help="the interval, and so the first step that is saved")
    parser.add_argument(
        "--saves", type=int, default=4, help="of a run; the median of the later ones is steadier of more"
    )
    parser.add_argument("--train-seconds", type=float, default=1.0, help="of products of matrices in a step")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--against", type=Path, help="another checkout, which is measured in the same rounds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _rank(**json.loads(args.child))
        return 0
    versions = {"this": ROOT} | ({"other": args.against.resolve()} if args.against else {})
    cells = [(mode, name) for mode in args.modes for name in versions]
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for number in range(args.rounds):
        for mode, name in random.Random(number).sample(cells, len(cells)):
            found[mode, name].append(_measured(versions[name], mode, args))
            print(f"round {number}, {mode}, {name}: first {found[mode, name][-1][0]:.3f} s", file=sys.stderr)
    for mode, name in cells:
        first, later = zip(*found[mode, name], strict=True)
        print(f"{mode:22} {name:6} first blocked {_figure(first)}   later {_figure(later)}")
    return 0


def _figure(seconds: tuple[float, ...]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def _measured(root: Path, mode: str, args: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds that the first save blocked the slowest of two ranks, and the median of the later ones."""
    with tempfile.TemporaryDirectory(dir=args.folder.absolute()) as folder:
        job = {
            "mode": mode,
            "params": int(args.params * 1e6),
            "interval": args.first,
            "saves": args.saves,
            "seconds": args.train_seconds,
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(job | {"rank": rank, "folder": folder})],
                env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TORCHTITAN_LITE_MEMORY": "off"},
            )
            for rank in range(2)
        ]
        try:
            if any(rank.wait(DEADLINE_SECONDS) for rank in ranks):
                sys.exit("a rank failed; see above")
        finally:
            for rank in ranks:
                rank.kill()
        of_ranks = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(2)]
    slowest = [max(pair) for pair in zip(*of_ranks, strict=True)]
    return slowest[0], statistics.median(slowest[1:])


def _rank(rank: int, folder: str, mode: str, params: int, interval: int, saves: int, seconds: float) -> None:
    """Train on one rank, and write how long each save blocked."""
    import torch
    import torch.distributed as dist

    from torchtitan_lite.checkpoint import CheckpointManager

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    num = max(1, params // 4_000_000)
    model = torch.nn.ParameterList([torch.randn(params // num) for _ in range(num)])
    optimizer = torch.optim.AdamW(model.parameters())
    blocked = [0.0]
    matrix = torch.randn(400, 400)
    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, folder=Path(folder, "checkpoint"), async_mode=mode, interval=interval
    ) as manager:
        manager.load()
        manager.reset()
        for step in range(1, saves * interval + 1):
            for each in model.parameters():
                each.grad = torch.full_like(each, 1e-3)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                matrix @ matrix
            began = time.monotonic()
            manager.maybe_wait_for_staging()
            blocked[-1] += time.monotonic() - began
            optimizer.step()
            dist.barrier()
            if step > interval and step % interval == 0:
                blocked.append(0.0)
            began = time.monotonic()
            manager.save(step)
            blocked[-1] += time.monotonic() - began
        dist.barrier()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(blocked))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
