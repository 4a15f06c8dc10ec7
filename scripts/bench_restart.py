"""Measure how long a job that was killed takes to the next trained step, how many steps it lost, and what it sent.

    python scripts/bench_restart.py --rounds 3
    python scripts/bench_restart.py --model 168m --only "ours, disk" dcp --kills ranks --json restart.json

Two ranks train, and are killed with SIGKILL at a random step between two checkpoints: one rank or both of them, which
torchrun starts again (--max-restarts); torchrun with its ranks, after which the command is run again; or one of two
hosts with all that is in its memory, which an empty one replaces (network namespaces, root only). The time from the
kill to the next trained step on rank 0 has these parts: `start`, to the new process of rank 0; `imports`, to the call
that opens the process group; `rendezvous`, to its end; `build`, of model, optimizer and data; `load`; and `step`, the
first one. `x` is the total over that of a fresh start of the trainer without checkpoints on as many hosts. In each
round each job is killed --times times. Contenders of other projects are skipped where they are not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests/ is not installed with the package.

from checkpoint_bench import machine
from checkpoint_bench.samples import Samples
from restart_bench.hosts_job import HostsJob
from restart_bench.jobs import CONTENDERS, FRESH, PARTS, KilledJob, Model, NotResumed, Times

MODELS = {
    "debug": Model(dim=128, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=352, batch_size=2, seq_len=64),
    "168m": Model(dim=1024, n_layers=13, n_heads=16, n_kv_heads=16, ffn_dim=2816, batch_size=1, seq_len=32),
}
KILLS = {
    "rank": "one rank, --max-restarts",
    "ranks": "both ranks, --max-restarts",
    "torchrun": "torchrun and its ranks, the command again",
    "host": "one of two hosts, an empty one in its place",
    "first host": "that of rank 0, which wrote to the folder",
}
STARTS = {"start": "a fresh start", "start on hosts": "a fresh start on two hosts"}
NEEDS = {"nvrx": "nvidia_resiliency_ext", "torchft": "torchft"}
"""The package that a contender needs."""
IMPOSSIBLE = {
    ("nvrx", "host"): "it exchanges what a host lost through CUDA alone",
    ("torchft", "ranks"): "its state is in the ranks",
    ("torchft", "torchrun"): "its state is in the ranks",
    ("torchft", "host"): "the same as a rank, without a shared folder",
}


def main() -> int:
    """Run the command."""
    args = _arguments().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    place = Path(args.folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    samples, skipped, not_resumed = Samples(), _skipped(), []
    names = [
        name
        for name in CONTENDERS
        if name not in skipped and (args.only is None or any(part in name for part in args.only))
    ]
    with tempfile.TemporaryDirectory(prefix="bench-restart-", dir=place) as folder:
        for number in range(args.rounds):
            cases = [(name, kill) for name in names for kill in args.kills if (name, kill) not in IMPOSSIBLE]
            cases += [(name, "start") for name in (FRESH, *names)]
            cases += [(FRESH, "start on hosts")] if "host" in args.kills else []
            drawn = random.Random(number)
            for name, kill in drawn.sample(cases, len(cases)):
                print(f"  round {number + 1} of {args.rounds}: {name}, {kill}", file=sys.stderr, flush=True)
                kind = HostsJob if kill in ("host", "start on hosts") else KilledJob
                run = Path(folder) / "run"
                try:
                    with kind(run, name, MODELS[args.model], args.interval) as job:
                        found = [job.start_fresh()] if kill in STARTS else job.killed(kill, args.times, drawn)
                        for times in found:
                            _add(samples, times.kill or kill, name, number, times)
                except NotResumed as error:
                    not_resumed.append(f"{name}, {kill}, round {number + 1}")
                    print(error, file=sys.stderr)
                shutil.rmtree(run)
    print(_table(samples))
    for case in not_resumed:
        print(f"did not train again: {case}")
    for name, why in skipped.items():
        print(f"not measured: {name}: {why}")
    if args.json:
        document = {"machine": machine.facts(place), "args": vars(args), "samples": samples.to_json()}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _add(samples: Samples, kill: str, name: str, number: int, times: Times) -> None:
    for part, seconds in times.parts.items():
        samples.add(kill, name, f"{part}_seconds", number, seconds)
    samples.add(kill, name, "total_seconds", number, sum(times.parts.values()))
    samples.add(kill, name, "lost_steps", number, times.lost_steps)
    samples.add(kill, name, "sent_megabytes", number, times.sent_bytes / 1e6)


def _table(samples: Samples) -> str:
    rows = [f"{'medians, seconds':<17}{'total':>6}{'x':>6}" + "".join(f"{part[:5]:>6}" for part in PARTS)]
    rows[0] += f"{'lost':>5}{'MB':>5}"
    for kill in [each for each in (*STARTS, *KILLS) if any(sample.workload == each for sample in samples.all)]:
        of_kill = [sample for sample in samples.all if sample.workload == kill]
        rows += ["-" * 75, f"{STARTS.get(kill) or KILLS[kill]}"]
        fresh = _median(samples, "start on hosts" if "host" in kill else "start", FRESH, "total_seconds")
        for name in dict.fromkeys(sample.contender for sample in of_kill):
            total, *seconds = (
                _median(samples, kill, name, figure) for figure in ("total_seconds", *(f"{p}_seconds" for p in PARTS))
            )
            count = sum(sample.contender == name and sample.figure == "total_seconds" for sample in of_kill)
            lost, sent = (_median(samples, kill, name, figure) for figure in ("lost_steps", "sent_megabytes"))
            rows.append(
                f"  {name:<12}{count:>3}{total:>6.2f}{total / fresh:>6.2f}"
                + "".join(f"{figure:>6.2f}" for figure in seconds)
                + f"{lost:>5.0f}{sent:>5.0f}"
            )
    return "\n".join(rows)


def _median(samples: Samples, kill: str, name: str, figure: str) -> float:
    return statistics.median(
        sample.value
        for sample in samples.all
        if (sample.workload, sample.contender, sample.figure) == (kill, name, figure)
    )


def _skipped() -> dict[str, str]:
    """Return the contenders that cannot be measured here, with the reason."""
    found = {name: f"{package} is not installed" for name, package in NEEDS.items() if not find_spec(package)}
    found |= {f"{name}, {kill}": why for (name, kill), why in IMPOSSIBLE.items() if name not in found}
    return found | {"torchtitan": "it trains on an accelerator only"}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="debug", help="debug (0.8 M parameters) or 168m")
    parser.add_argument(
        "--kills",
        nargs="*",
        choices=list(KILLS)[:-1],
        default=list(KILLS)[:-1],
        help="all by default; none: starts only",
    )
    parser.add_argument("--only", nargs="+", help="only contenders whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=3, help="kills of each job; 3")
    parser.add_argument("--interval", type=int, default=8, help="steps between checkpoints; 8")
    parser.add_argument("--folder", default=os.curdir, help="folder for the temporary files, made if missing")
    parser.add_argument("--json", help="file for all samples")
    return parser


if __name__ == "__main__":
    sys.exit(main())
