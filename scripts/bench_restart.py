"""Measure how long a job that was killed takes to the next trained step, and how many steps it lost.

    python scripts/bench_restart.py --rounds 3
    python scripts/bench_restart.py --model 168m --only "ours, disk" dcp --kills ranks --json restart.json

Two ranks train, are killed with SIGKILL after a step between two checkpoints, and start again: one rank or all of them,
where torchrun starts them again (--max-restarts) or the command is run again as soon as it has ended; or torchrun with
its ranks. The time from the kill to the next trained step on rank 0 has these parts: `start`, to the new process of
rank 0; `imports`, to the call that opens the process group; `rendezvous`, to its end; `build`, of model, optimizer and
data; `load`; and `step`, the first one. `fresh` is the same job started without checkpoints.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from checkpoint_bench import machine
from checkpoint_bench.samples import Samples
from restart_bench.jobs import CONTENDERS, PARTS, KilledJob, Model, Times

from torchtitan_lite.config.job_config import Checkpoint

MODELS = {
    "debug": Model(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=352, batch_size=2, seq_len=64),
    "168m": Model(dim=1024, n_layers=13, n_heads=16, n_kv_heads=16, hidden_dim=2816, batch_size=1, seq_len=32),
}
KILLS = {
    "rank": "one rank, --max-restarts",
    "ranks": "all ranks, --max-restarts",
    "rank, relaunch": "one rank, the command again",
    "ranks, relaunch": "all ranks, the command again",
    "torchrun": "torchrun and its ranks, the command again",
}


def main() -> int:
    """Run the command."""
    args = _arguments().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    place = Path(args.folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    samples, skipped = Samples(), _skipped()
    names = [
        name
        for name in CONTENDERS
        if name not in skipped and (args.only is None or any(part in name for part in args.only))
    ]
    with tempfile.TemporaryDirectory(prefix="bench-restart-", dir=place) as folder:
        for number in range(args.rounds):
            cases = [(name, kill) for name in names for kill in args.kills]
            cases += [("fresh", "")]
            for name, kill in random.Random(number).sample(cases, len(cases)):
                print(f"  round {number + 1} of {args.rounds}: {name} {kill}", file=sys.stderr, flush=True)
                run = Path(folder) / "run"
                _measure(samples, number, name, kill, KilledJob(run, name, MODELS[args.model], args.interval))
                shutil.rmtree(run)
    print(_table(samples))
    for name, why in skipped.items():
        print(f"not measured: {name}: {why}")
    if args.json:
        document = {"machine": machine.facts(place), "args": vars(args), "samples": samples.to_json()}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(samples: Samples, number: int, name: str, kill: str, job: KilledJob) -> None:
    with job:
        times = job.start_fresh() if name == "fresh" else job.killed(kill)
    _add(samples, kill or "start", name, number, times)


def _add(samples: Samples, kill: str, name: str, number: int, times: Times) -> None:
    for part, seconds in times.parts.items():
        samples.add(kill, name, f"{part}_seconds", number, seconds)
    samples.add(kill, name, "total_seconds", number, sum(times.parts.values()))
    samples.add(kill, name, "lost_steps", number, times.lost_steps)


def _table(samples: Samples) -> str:
    rows = [f"{'seconds, medians':<19}{'total':>7}" + "".join(f"{part[:7]:>8}" for part in PARTS) + f"{'lost':>6}"]
    for kill in dict.fromkeys(sample.workload for sample in samples.all):
        rows += ["-" * 80, KILLS.get(kill, "not killed, no checkpoints")]
        for name in dict.fromkeys(sample.contender for sample in samples.all if sample.workload == kill):
            figures = [
                statistics.median(samples.by_round(kill, name, figure).values())
                for figure in ("total_seconds", *(f"{part}_seconds" for part in PARTS), "lost_steps")
            ]
            rows.append(
                f"  {name:<17}{figures[0]:>7.2f}"
                + "".join(f"{figure:>8.2f}" for figure in figures[1:-1])
                + f"{figures[-1]:>6.0f}"
            )
    return "\n".join(rows)


def _skipped() -> dict[str, str]:
    """Return the contenders that cannot be measured here, with the reason."""
    found = {}
    if "memory_interval" not in Checkpoint.__dataclass_fields__:
        found["ours, memory"] = "this version has no checkpoint.memory_interval"
    if importlib.util.find_spec("torchtitan") is None:
        found["torchtitan"] = "not installed"
    elif not torch.cuda.is_available():
        found["torchtitan"] = "it trains on an accelerator only"
    else:
        found["torchtitan"] = "its moments are not known to this script; docs/performance.md has its loads"
    return found


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="debug", help="debug (0.8 M parameters) or 168m")
    parser.add_argument("--kills", nargs="+", choices=KILLS, default=list(KILLS), help="all by default")
    parser.add_argument("--only", nargs="+", help="only contenders whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--interval", type=int, default=8, help="steps between checkpoints; 8")
    parser.add_argument("--folder", default=os.curdir, help="folder for the temporary files, made if missing")
    parser.add_argument("--json", help="file for all samples")
    return parser


if __name__ == "__main__":
    sys.exit(main())
