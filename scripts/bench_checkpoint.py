"""Measures saves and loads of checkpoints beside the disk itself and beside others, all in one run.

    python scripts/bench_checkpoint.py --quick
    python scripts/bench_checkpoint.py --rounds 7 --peers --json bench.json --targets

Every round measures everything once, in another order: absolute figures drift, ratios within a round do
not. A figure is a median; what stands under it
is how far the lowest and the highest are from it. What a contender loads is
compared with what it saved, bit by bit, once for each. A file is made cold by fsync and posix_fadvise
(DONTNEED), and mincore says how much of it the page cache still had; it is made warm by reading it.
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
    """How much is measured."""

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
        """What the command line asks for."""
        if args.quick:
            return cls(args.rounds or 2, args.rounds or 1, 1_000_000, 200, 64, 0.05, 1_000_000, 1 << 20)
        rounds = args.rounds or 5
        others = rounds if args.others_async_rounds is None else args.others_async_rounds
        return cls(rounds, others, int(args.params * 1e6), args.tensors, args.train_dim, 0.7, 20_000_000, 1 << 28)


def main() -> int:
    """The command; the exit code is 0 unless what was loaded is not what was saved, or the folder does not do."""
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
    if not place.is_dir():
        print(f"{place} is no folder: make it first, or name another --folder", file=sys.stderr)
        return 2
    needed = _needed_bytes(settings)
    if (free := shutil.disk_usage(place).free) < needed:
        print(
            f"{place} has room for {free >> 20} MiB, this takes {needed >> 20}: name another --folder", file=sys.stderr
        )
        return 2
    _be_quiet()
    # Ended from outside, it still removes what it wrote.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=place) as folder:
        document = _Bench(args, settings, Path(folder)).run()
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


class _Bench:
    """One run."""

    def __init__(self, args: argparse.Namespace, settings: Settings, folder: Path) -> None:
        self._args, self._settings, self._folder = args, settings, folder
        self._samples = Samples()
        self._skipped: dict[str, str] = {}
        self._syncs: dict[str, str] = {"raw": "itself: fdatasync"}

    def run(self) -> dict[str, Any]:
        """Measures all, prints the tables, and returns what goes into the JSON."""
        facts = machine.facts(self._folder)
        began = datetime.datetime.now(datetime.timezone.utc)
        if not disk.takes_direct(self._folder):
            self._skipped["raw"] = "direct I/O is refused here: what is a ratio of the raw disk cannot be measured"
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
        in_turn.measure(workload, states.make(state), chosen, self._folder, rounds, self._samples, self._tell)

    def _works(self, contender: Contender) -> bool:
        """Whether it saves and loads a small state here; ours must."""
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
        if kind == "memory" and not machine.memory_before_a_peak_can_be_told():
            self._skipped["extra memory"] = "this kernel lets no process set its high-water mark"
            return
        for number in range(rounds):
            for name in random.Random(number).sample(list(names), len(names)):
                is_enough = others_rounds is not None and number >= others_rounds and not apart.is_of_a_target(name)
                if name in self._skipped or is_enough:
                    continue
                self._tell(f"{workload}: {kind}, round {number + 1} of {rounds}: {name}")
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
        self._tell("fsdp2: two ranks")
        job = common | {"kind": "ranks", "mesh": "fsdp2", "workload": "fsdp2", "params": self._settings.params}
        sharded.measure(job, self._samples)
        for mesh in ("ddp", "hsdp"):
            self._tell(f"{mesh}: who writes what")
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

    def _tell(self, what: str) -> None:
        print(f"  {what}", file=sys.stderr, flush=True)


def _child(job: dict[str, Any]) -> int:
    """One of the processes that the bench starts."""
    _be_quiet()
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
    """What scripts/simulate_scale.py wrote, by the name of the target."""
    if path is None:
        return {}
    figures: dict[str, float] = json.loads(Path(path).read_text(encoding="utf-8"))["targets"]
    return figures


def _needed_bytes(settings: Settings) -> int:
    """Two checkpoints at a time, the manager's last one and the next, and some room."""
    return 3 * settings.params * 12 + settings.tensors * 2 * states.SMALL_BYTES + (64 << 20)


def _be_quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS, help="all by default")
    parser.add_argument("--rounds", type=int, help="5 by default, 2 with --quick")
    parser.add_argument("--others-async-rounds", type=int, help="of others' saves in the background; as --rounds")
    parser.add_argument("--params", type=float, default=168, help="millions of parameters of llama and fsdp2; 168")
    parser.add_argument("--tensors", type=int, default=20_000, help="of 4 KiB, of small; 20000")
    parser.add_argument("--train-dim", type=int, default=384, help="width of the model that is trained beside; 384")
    parser.add_argument("--only", nargs="+", help="contenders whose name has one of these in it")
    parser.add_argument("--peers", action="store_true", help="other libraries, too, where they are installed")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, the figures mean nothing")
    parser.add_argument("--folder", help="where files are written, in a folder of its own; here")
    parser.add_argument("--json", help="file for all samples, the table and the targets")
    parser.add_argument("--targets", action="store_true", help="the table of targets, after the others")
    parser.add_argument("--scale", help="the JSON of scripts/simulate_scale.py, for the targets that it measures")
    parser.add_argument("--of", metavar="JSON", help="measure nothing: the table of targets of an earlier run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
