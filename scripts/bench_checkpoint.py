"""Measure saves and loads of checkpoints, compared with the raw disk and with other libraries, in one run.

    python scripts/bench_checkpoint.py --quick
    python scripts/bench_checkpoint.py --rounds 7 --peers --json bench.json --targets

Every round measures everything once, in a new order: absolute figures drift, ratios within a round do not. A figure is
a median; below it are the distances of the lowest and the highest value. For each contender the loaded state is
compared once with the saved one, bit by bit. A file is made cold with fsync and posix_fadvise(DONTNEED), and mincore
measures how much of it was still in the page cache; it is made warm by reading it.

States: `llama`, fp32 parameters of a llama of 168 M parameters and both moments of AdamW, 2.02 GB; `llama/8`, an
eighth of it; `fsdp2`, sharded over two processes; `small`, 20,000 tensors of 4 KiB. `raw` writes and reads the same
bytes as one preallocated file; `memcpy` copies the state with two threads; `raw copied` is the minimum of a copy and a
write in a thread. `save` lasts until the checkpoint is complete and synced, `durable` the same of a save in the
background; `stall` is the time for which the save blocks training, `first` that of a process's first save. `MiB` is
peak memory beyond the state. `x steps` divides the median step during a save by that of steps just before and after;
the training keeps every core busy. Ours syncs files and folders, DCP and torchtitan no folder; for others the bench
syncs the files in the measured time, but not those that torch_checkpointing writes in the background.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import logging
import random
import shutil
import signal
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoint_bench import apart, disk, in_turn, machine, ours, peers, report, sharded, states, targets
from checkpoint_bench.contenders import Contender, is_installed
from checkpoint_bench.raw_copied import RawCopied
from checkpoint_bench.samples import Samples

from torchtitan_lite.checkpoint.format.tensor_digest import digest_chunk

WORKLOADS = ("llama", "small", "fsdp2")


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sizes and numbers of a run."""

    rounds: int
    others_async_rounds: int
    params: int
    tensors: int
    train_dim: int
    train_seconds: float
    bytes_params: int
    digest_bytes: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Settings:
        """Return the settings of the command line."""
        if args.quick:
            return cls(args.rounds or 2, args.rounds or 1, 1_000_000, 200, 64, 0.05, 1_000_000, 1 << 20)
        rounds = args.rounds or 5
        others = rounds if args.others_async_rounds is None else args.others_async_rounds
        return cls(rounds, others, int(args.params * 1e6), args.tensors, args.train_dim, 0.7, 20_000_000, 1 << 28)


def main() -> int:
    """Run the command. Return 0, or 2 if the folder cannot be used. A load that differs from its save raises."""
    args = _arguments().parse_args()
    if args.child:
        return _child(json.loads(args.child))
    if args.of:
        document = json.loads(Path(args.of).read_text(encoding="utf-8"))
        samples = Samples()
        samples.extend(document["samples"])
        print(report.targets(targets.judged(samples, _figures_of_scale(args.scale))))
        return 0
    settings = Settings.of(args)
    place = Path(args.folder or ".").absolute()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"{place} cannot be used: {error}. Name another --folder", file=sys.stderr)
        return 2
    needed = _needed_bytes(settings)
    if (free := shutil.disk_usage(place).free) < needed:
        print(f"{place} has {free >> 20} MiB free, expected {needed >> 20} MiB: name another --folder", file=sys.stderr)
        return 2
    be_quiet()
    # On SIGTERM, exit through the code that removes the files.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=place) as folder:
        document = _Bench(args, settings, Path(folder)).run()
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


class _Bench:
    """One run of the bench."""

    def __init__(self, args: argparse.Namespace, settings: Settings, folder: Path) -> None:
        self._args, self._settings, self._folder = args, settings, folder
        self._samples = Samples()
        self._skipped: dict[str, str] = {}
        self._syncs: dict[str, str] = {"raw": "itself: fdatasync"}

    def run(self) -> dict[str, Any]:
        """Measure everything and print the tables. Return the content of the JSON file."""
        facts = machine.facts(self._folder)
        began = datetime.datetime.now(datetime.timezone.utc)
        if not disk.takes_direct(self._folder):
            self._skipped["raw"] = "this file system refuses direct I/O, so ratios to the raw disk cannot be measured"
        if "llama" in self._args.workloads:
            self._llama()
        if "small" in self._args.workloads:
            self._in_turn("small", {"kind": "small", "tensors": self._settings.tensors}, self._settings.rounds)
        if "fsdp2" in self._args.workloads:
            self._sharded()
        judged = targets.judged(self._samples, _figures_of_scale(self._args.scale))
        print(report.tables(self._samples, self._syncs))
        for name, why in self._skipped.items():
            print(textwrap.fill(f"not measured: {name}: {why}", report.WIDTH, subsequent_indent="    "))
        if self._args.targets:
            print("\n" + report.targets(judged))
        return {
            "format": 1,
            "date": began.isoformat(timespec="seconds"),
            "command": ["python", *sys.argv],
            "machine": facts,
            "settings": dataclasses.asdict(self._settings),
            "made_cold_by": "fsync and posix_fadvise(DONTNEED)",
            "who_syncs": self._syncs,
            "skipped": self._skipped,
            "table": [dataclasses.asdict(line) for line in self._samples.lines()],
            "targets": judged,
            "samples": self._samples.to_json(),
        }

    def _llama(self) -> None:
        settings = self._settings
        state = {"kind": "llama", "params": settings.params}
        self._in_turn("llama", state, settings.rounds)
        self._in_turn(
            "llama/8", state | {"params": settings.params // 8}, settings.rounds, self._chosen(["ours", "dcp"])
        )
        self._apart("memory", self._names(), "llama", state, rounds=settings.rounds, others_rounds=1)
        others = settings.others_async_rounds
        self._apart("async", self._async_names(), "llama", state, rounds=settings.rounds, others_rounds=others)
        self._tensor_digests()

    def _in_turn(self, workload: str, state: dict[str, Any], rounds: int, names: Sequence[str] | None = None) -> None:
        chosen: list[Contender] = []
        for name in self._names() if names is None else names:
            contender: Contender = apart.CONTENDERS[name]()
            if self._works(contender):
                chosen.append(contender)
                self._syncs[name] = contender.who_syncs
        in_turn.measure(workload, states.make(state), chosen, self._folder, rounds, self._samples, self._print_progress)

    def _works(self, contender: Contender) -> bool:
        """Return whether `contender` saves and loads a small state here. Raise if ours does not."""
        folder = self._folder / "try"
        folder.mkdir()
        small = states.llama_state(1)
        target = small.like()
        try:
            contender.save(small, folder)
            contender.load(target, folder, warm=True)
            small.assert_equals(target, contender.name)
        except Exception as error:
            if isinstance(contender, ours.Ours):
                raise
            self._skipped[contender.name] = f"{type(error).__name__}: {error}".splitlines()[0]
            return False
        finally:
            disk.remove(folder)
        return True

    def _apart(
        self,
        kind: str,
        names: Sequence[str],
        workload: str,
        state: dict[str, Any],
        rounds: int,
        others_rounds: int | None = None,
    ) -> None:
        if kind == "memory" and not machine.has_resettable_peak():
            self._skipped["extra memory"] = "this kernel does not let a process reset its high-water mark"
            return
        for number in range(rounds):
            for name in random.Random(number).sample(list(names), len(names)):
                is_enough = others_rounds is not None and number >= others_rounds and not apart.is_of_a_target(name)
                if name in self._skipped or is_enough:
                    continue
                self._print_progress(f"{workload}: {kind}, round {number + 1} of {rounds}: {name}")
                job = {
                    "kind": kind,
                    "contender": name,
                    "workload": workload,
                    "state": state,
                    "round": number,
                    "train_dim": self._settings.train_dim,
                    "train_seconds": self._settings.train_seconds,
                    "folder": str(self._folder),
                }
                try:
                    self._samples.extend(apart.run(job))
                except apart.ChildFailed as error:
                    if name.startswith("ours"):
                        raise
                    self._skipped[name] = str(error)

    def _sharded(self) -> None:
        common = {"contender": "ranks", "folder": str(self._folder), "rounds": self._settings.rounds}
        self._print_progress("fsdp2: two ranks")
        job = common | {"kind": "ranks", "mesh": "fsdp2", "workload": "fsdp2", "params": self._settings.params}
        sharded.measure(job, self._samples)
        for mesh in ("ddp", "hsdp"):
            self._print_progress(f"{mesh}: bytes by rank")
            job = common | {"kind": "bytes", "mesh": mesh, "workload": f"{mesh} bytes"}
            sharded.measure(job | {"params": self._settings.bytes_params}, self._samples)

    def _tensor_digests(self) -> None:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        tensor = torch.rand(self._settings.digest_bytes // 4)
        for number in range(self._settings.rounds):
            with machine.spending() as spent:
                digest_chunk(tensor, global_shape=tensor.shape, offsets=(0,))
            gb = self._settings.digest_bytes / 1e9
            self._samples.add("digest", "ours", "tensor_digest_gb_per_second", number, gb / spent.seconds)
        torch.set_num_threads(threads)

    def _names(self) -> list[str]:
        names = ["ours", "ours, no digests", "dcp", "torch.save", "safetensors"]
        if not is_installed("safetensors"):
            names.remove("safetensors")
            self._skipped["safetensors"] = "not installed; python -m pip install safetensors"
        return self._chosen([*names, *self._peers(peers.PEERS)])

    def _async_names(self) -> list[str]:
        own = [name for name in apart.ASYNC_CONTENDERS if name not in peers.ASYNC_PEERS]
        if "raw" in self._skipped:
            own.remove(RawCopied.name)
        return self._chosen([*own, *self._peers(peers.ASYNC_PEERS)])

    def _peers(self, known: dict[str, Any]) -> list[str]:
        if not self._args.peers:
            return []
        missing = peers.missing()
        self._skipped |= missing
        return [name for name in known if name.partition(" ")[0] not in missing]

    def _chosen(self, names: list[str]) -> list[str]:
        only = self._args.only
        return [name for name in names if only is None or any(part in name for part in only)]

    def _print_progress(self, what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)


def _child(job: dict[str, Any]) -> int:
    """Run one of the processes that the bench starts."""
    be_quiet()
    samples = Samples()
    serve = {
        "memory": apart.serve_memory,
        "async": apart.serve_async,
        "ranks": sharded.serve,
        "bytes": sharded.serve,
    }
    serve[job["kind"]](job, samples)
    Path(job["answer"]).write_text(json.dumps(samples.to_json()), encoding="utf-8")
    return 0


def _figures_of_scale(path: str | None) -> dict[str, float]:
    """Return the figures that scripts/simulate_scale.py wrote, by the name of the target."""
    if path is None:
        return {}
    figures: dict[str, float] = json.loads(Path(path).read_text(encoding="utf-8"))["targets"]
    return figures


def _needed_bytes(settings: Settings) -> int:
    """Return the bytes of the manager's last checkpoint and the next one, with a reserve."""
    return 3 * settings.params * 12 + settings.tensors * 2 * states.SMALL_BYTES + (64 << 20)


def be_quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="all by default")
    parser.add_argument("--rounds", type=int, help="5 by default, 2 with --quick")
    parser.add_argument(
        "--others-async-rounds", type=int, help="rounds of background saves of others; default: --rounds"
    )
    parser.add_argument("--params", type=float, default=168, help="millions of parameters of llama and fsdp2; 168")
    parser.add_argument("--tensors", type=int, default=20_000, help="tensors of 4 KiB in the workload small; 20000")
    parser.add_argument("--train-dim", type=int, default=384, help="width of the model that trains during a save; 384")
    parser.add_argument("--only", nargs="+", help="only contenders whose name contains one of these")
    parser.add_argument("--peers", action="store_true", help="also measure other libraries that are installed")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to test that it runs")
    parser.add_argument("--folder", help="folder for the temporary files, made if missing; default: .")
    parser.add_argument("--json", help="file for all samples, the table and the targets")
    parser.add_argument("--targets", action="store_true", help="also print the table of targets")
    parser.add_argument("--scale", help="the JSON of scripts/simulate_scale.py, for the targets that it measures")
    parser.add_argument("--of", metavar="JSON", help="measure nothing; print the targets of an earlier run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
