"""Measure what a long history costs: many steps, many tensors, many starts.

    python scripts/bench_long_folders.py --json long_folders.json
    python scripts/bench_long_folders.py --quick

The trainer trains a tiny model and saves after every step: `steps`, of which the latest 200 are kept, in one start, or
one or two in each of many `starts`, of which the latest 10 are kept. Each round starts once in a copy of the folder of
each length, in a new order, in a process that has loaded everything. `start` is the time to the first batch; `save` the
median of those that were due after the first one, and planning and retention are its parts; `ls` is the command's,
without the start of Python. `tensors` has a manager with a dict of small tensors in a new folder. Seconds are those of
processors, which other jobs of the machine change little; figures are medians of the rounds. Sizes are those of the
records next to the checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_bench import disk, machine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.cli import app
from torchtitan_lite.config.manager import parse_config
from torchtitan_lite.distributed.process_group import World, process_group
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.trainer import Trainer

LENGTHS = {"steps": (10, 100, 1000, 10_000), "starts": (1, 10, 100, 1000), "tensors": (100, 1000, 10_000, 100_000)}
QUICK = {"steps": (3, 10), "starts": (1, 3), "tensors": (10, 100)}
KEPT = {"steps": 200, "starts": 10}
DUE_SAVES = 5
MODEL = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 258, "rms_norm_eps": 1e-5}
OPTIONS = ("--job.config_file=llama_debug.toml", "--training.batch_size=1", "--training.seq_len=16")
OPTIONS += ("--training.steps=20000", "--lr_scheduler.warmup_steps=1", "--checkpoint.interval=1")

Figures = dict[str, float]
Measure = Callable[[], Figures]


def main() -> int:
    """Print a table for each kind of length; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for kind, usual in LENGTHS.items():
        text = f"lengths ({', '.join(map(str, usual))}); none: not measured"
        parser.add_argument(f"--{kind}", nargs="*", type=int, metavar="LENGTH", default=usual, help=text)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="short lengths, which only show that everything works")
    parser.add_argument("--folder", default=os.curdir, help="folder for the temporary files, made if missing")
    parser.add_argument("--built", type=Path, help="folder where the runs stay, which a later call measures or grows")
    parser.add_argument("--json", help="file for all figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    place = Path(args.folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    lengths, found = QUICK if args.quick else {kind: vars(args)[kind] for kind in LENGTHS}, {}
    with process_group(parse_config(OPTIONS).comm) as world, tempfile.TemporaryDirectory(dir=place) as folder:
        for kind in filter(lengths.get, LENGTHS):
            cases = _cases(kind, lengths[kind], (args.built or Path(folder)) / kind, world)
            found[kind] = _in_rounds(cases, 1 if args.quick else args.rounds)
            print("\n".join(_table(kind, found[kind])), flush=True)
    if args.json:
        document = {"machine": machine.facts(place), "figures": found}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def _cases(kind: str, lengths: Sequence[int], folder: Path, world: World) -> dict[int, Measure]:
    """Return what measures each length once. A run grows from one length to the next, and each has a copy of it."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "tensors":
        return {length: partial(_of_tensors, folder / str(length), length) for length in lengths}
    run = folder / "run"
    for length in lengths:
        print(f"  up to {length} {kind}", file=sys.stderr, flush=True)
        while not (folder / str(length)).exists() and (missing := length - _grown(run, kind)) > 0:
            _job(run, missing if kind == "steps" else 1, KEPT[kind], world)
        if not (folder / str(length)).exists():
            shutil.copytree(run, folder / str(length))
    return {length: partial(_of_a_run, folder / str(length), KEPT[kind], world) for length in lengths}


def _grown(run: Path, kind: str) -> int:
    """Return how many steps or starts `run` has had."""
    if kind == "starts":
        return len(list((run / "tb").glob("*")))  # A folder, or a file, each.
    return max(layout.Listing(run / "checkpoint").steps(), default=0)


def _in_rounds(cases: dict[int, Measure], rounds: int) -> dict[int, Figures]:
    """Return the medians of each case, which each round measures in a new order."""
    found: dict[int, list[Figures]] = {length: [] for length in cases}
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for length in random.Random(number).sample([*cases], len(cases)):
            found[length].append(cases[length]())
    return {
        length: {name: statistics.median(each[name] for each in rounds_of) for name in rounds_of[0]}
        for length, rounds_of in found.items()
    }


def _of_a_run(folder: Path, kept: int, world: World) -> Figures:
    sizes, listed = _sizes(folder), _run("ls", str(folder))
    copied = folder.with_name("measured")
    shutil.copytree(folder, copied)
    found = _job(copied, DUE_SAVES, kept, world)
    shutil.rmtree(copied)
    # The first save makes the plan, and the last one waits for all that the run still does.
    seconds = {f"{name} s": statistics.median(found[name][1:-1]) for name in ("save", "planning", "retention")}
    return {"start s": found["start"][0]} | seconds | {"ls s": listed} | sizes


def _job(folder: Path, steps: int, kept: int, world: World) -> dict[str, list[float]]:
    """Start the trainer in `folder`, train `steps` steps, leave for a signal, and return the seconds of parts."""
    folder.mkdir(exist_ok=True)
    (folder / "model.json").write_text(json.dumps(MODEL), encoding="utf-8")
    last = steps + _grown(folder, "steps")
    own = [f"--job.dump_folder={folder}", f"--model.config_path={folder}/model.json"]
    own.append(f"--checkpoint.keep_latest_k={kept}")
    found, has_left = {"start": list[float]()}, list[bool]()
    began = time.process_time()
    config = parse_config([*OPTIONS, *own])
    with (
        _timed(PlanCache, "plan") as found["planning"],
        _timed(Housekeeping, "purge") as found["retention"],
        _timed(CheckpointManager, "save") as found["save"],
    ):
        trainer: Any = Trainer(config, world)
        next_batch = trainer._next_batch

        def batch() -> Any:
            if not found["start"]:
                found["start"].append(time.process_time() - began)
            if trainer.train_state.step >= last - 1 and not has_left:
                has_left.append(True)
                os.kill(os.getpid(), signal.SIGUSR1)  # It saves after this step or the next one, and leaves.
            return next_batch()

        trainer._next_batch = batch
        if trainer.run() != 128 + signal.SIGUSR1:
            sys.exit("a run did not end as it should")
    return found


@contextlib.contextmanager
def _timed(owner: type, name: str) -> Iterator[list[float]]:
    """Append the seconds of each call of the method `name`, in the block."""
    method, seconds = getattr(owner, name), list[float]()

    def timed(*arguments: Any, **keywords: Any) -> Any:
        began = time.process_time()
        try:
            return method(*arguments, **keywords)
        finally:
            seconds.append(time.process_time() - began)

    setattr(owner, name, timed)
    try:
        yield seconds
    finally:
        setattr(owner, name, method)


def _of_tensors(root: Path, length: int) -> Figures:
    """Save and load `length` tensors in the folder `root`, which goes then."""
    state: dict[str, Any] = {f"layers.{number}.w": torch.full((8,), float(number)) for number in range(length)}
    options: dict[str, Any] = {"states": {"many": state}, "folder": root, "interval": 1, "keep_latest_k": 2}
    with (
        _timed(PlanCache, "plan") as plans,
        CheckpointManager.for_loop(model=torch.nn.Linear(2, 2), **options) as manager,
    ):
        manager.load()
        saves = [_seconds_of(lambda step=step: manager.save(step)) for step in range(1, DUE_SAVES)]
    figures = {"first save s": saves[0], "later save s": statistics.median(saves[1:])}
    figures |= {"first plan s": plans[0], "later plan s": statistics.median(plans[1:])}
    with CheckpointManager.for_loop(model=torch.nn.Linear(2, 2), **options) as manager:
        figures["load s"] = _seconds_of(manager.load)
    figures |= {"ls s": _run("ls", str(root)), "inspect s": _run("inspect", str(root))}
    figures |= {"manifest kB": _manifest_bytes(root) / 1000, "files MB": disk.num_bytes(root) / 2e6}
    shutil.rmtree(root)
    return figures


def _run(*arguments: str) -> float:
    """Return the seconds of the command."""
    with contextlib.redirect_stdout(io.StringIO()):
        return _seconds_of(lambda: app.main(arguments))


def _seconds_of(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _sizes(folder: Path) -> Figures:
    """Return the kB of each record in the dump folder and in that of checkpoints, which are counted."""
    found: Figures = {}
    for path in disk.files(folder):
        name = path.relative_to(folder).parts[0] if "checkpoint" not in path.parts else path.name
        if not any(layout.parse_step(part) is not None for part in path.parts):
            found[f"{name} kB"] = found.get(f"{name} kB", 0.0) + path.stat().st_size / 1000
    steps = layout.Listing(folder / "checkpoint").committed_steps()
    return {"kept": len(steps), "manifest kB": _manifest_bytes(folder / "checkpoint") / 1000} | found


def _manifest_bytes(root: Path) -> int:
    latest = layout.Listing(root).committed_steps()[-1]
    return (root / layout.step_dir(latest) / layout.MANIFEST).stat().st_size


def _table(kind: str, found: dict[int, Figures]) -> Iterator[str]:
    yield f"{kind:<24}" + "".join(f"{length:>12,}" for length in found)
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        digits = 0 if name == "kept" else 1 if name.endswith("B") else 4
        yield f"{name:<24}" + "".join(f"{figures.get(name, 0.0):>12,.{digits}f}" for figures in found.values())


if __name__ == "__main__":
    sys.exit(main())
