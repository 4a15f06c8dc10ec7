"""Measure what a long history costs: many steps, many tensors, many starts.

    python scripts/bench_long_folders.py --json long_folders.json
    python scripts/bench_long_folders.py --quick

The trainer trains a tiny model, saves after every step and keeps the latest 200 (`steps`), or starts again for each
step (`starts`). At each length five more starts are timed, each to its first batch, in one process that has loaded
everything; a save is the median of the last twenty that were due, planning and retention are its parts; `ls` is the
command's, without the start of Python. `tensors` has a manager with a dict of small tensors. Each figure is a median.
Sizes are those of the records next to the checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
QUICK = {"steps": (3, 10), "starts": (1, 7), "tensors": (10, 100)}
KEPT = 200
REPEATS, LAST_SAVES = 5, 20
MODEL = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 258, "rms_norm_eps": 1e-5}
OPTIONS = ("--job.config_file=llama_debug.toml", "--training.batch_size=1", "--training.seq_len=16")
OPTIONS += ("--training.steps=20000", "--lr_scheduler.warmup_steps=1", "--checkpoint.interval=1")
OPTIONS += (f"--checkpoint.keep_latest_k={KEPT}",)

Figures = dict[str, float]


def main() -> int:
    """Print a table for each kind of length; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LENGTHS, default=[*LENGTHS])
    parser.add_argument("--quick", action="store_true", help="short lengths, which only show that everything works")
    parser.add_argument("--folder", default=os.curdir, help="folder for the temporary files, made if missing")
    parser.add_argument("--json", help="file for all figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    place = Path(args.folder).absolute()
    place.mkdir(parents=True, exist_ok=True)
    lengths, found = QUICK if args.quick else LENGTHS, dict[str, dict[int, Figures]]()
    kinds = {"steps": of_steps, "starts": of_starts, "tensors": of_tensors}
    with process_group(parse_config(OPTIONS).comm) as world:
        for kind in args.only:
            with tempfile.TemporaryDirectory(prefix="bench-long-", dir=place) as folder:
                found[kind] = {}
                for length in lengths[kind]:
                    print(f"  {length} {kind}", file=sys.stderr, flush=True)
                    found[kind][length] = kinds[kind](Path(folder), length, world)
            print("\n".join(_table(kind, found[kind])), flush=True)
    if args.json:
        document = {"machine": machine.facts(place), "figures": found}
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def of_steps(folder: Path, length: int, world: World) -> Figures:
    """Train in `folder` up to step `length`, and return the figures of the folder then."""
    return _of_a_run(folder, world, _job(folder, length, world))


def of_starts(folder: Path, length: int, world: World) -> Figures:
    """Start for one step each until there were `length` starts, and return the figures of the folder then."""
    num_before = len(list((folder / "tb").glob("*")))  # One folder each.
    jobs = [_job(folder, 1, world) for _ in range(num_before, length)]
    before = {name: [each for job in jobs for each in job[name]] for name in jobs[0]}
    return _of_a_run(folder, world, before)


def _of_a_run(folder: Path, world: World, before: dict[str, list[float]]) -> Figures:
    starts = [_job(folder, 1, world)["start"][0] for _ in range(REPEATS)]
    figures = {"start s": statistics.median(starts)}
    for name in ("save", "planning", "retention"):
        figures[f"{name} s"] = statistics.median(before[name][-LAST_SAVES:])
    return figures | {"ls s": _listed(folder)} | _sizes(folder)


def _job(folder: Path, last: int, world: World) -> dict[str, list[float]]:
    """Start the trainer in `folder`, train up to step `last`, leave for a signal, and return the seconds of parts."""
    (folder / "model.json").write_text(json.dumps(MODEL), encoding="utf-8")
    own = (f"--job.dump_folder={folder}", f"--model.config_path={folder}/model.json")
    found, has_left = {"start": list[float]()}, list[bool]()
    began = time.perf_counter()
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
                found["start"].append(time.perf_counter() - began)
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
        began = time.perf_counter()
        try:
            return method(*arguments, **keywords)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, timed)
    try:
        yield seconds
    finally:
        setattr(owner, name, method)


def of_tensors(folder: Path, length: int, world: World) -> Figures:
    """Save and load `length` tensors, and return the figures."""
    state: dict[str, Any] = {f"layers.{number}.w": torch.full((8,), float(number)) for number in range(length)}
    root, figures = folder / str(length), Figures()
    for start in range(2):
        with (
            _timed(PlanCache, "plan") as planning,
            CheckpointManager.for_loop(
                model=torch.nn.Linear(2, 2), states={"many": state}, folder=root, interval=1, keep_latest_k=2
            ) as manager,
        ):
            figures["load s"] = _seconds_of(manager.load)
            if start == 0:
                saves = [_seconds_of(lambda step=step: manager.save(step)) for step in range(1, REPEATS + 2)]
                figures |= {"first save s": saves[0], "save s": statistics.median(saves[1:])}
                figures |= {"first plan s": planning[0], "plan s": statistics.median(planning[1:])}
    figures |= {"ls s": _listed(root), "inspect s": _run("inspect", str(root))}
    return figures | {"manifest kB": _manifest_bytes(root) / 1000, "files MB": disk.num_bytes(root) / 2e6}


def _listed(folder: Path) -> float:
    return statistics.median(_run("ls", str(folder)) for _ in range(REPEATS))


def _run(*arguments: str) -> float:
    """Return the seconds of the command."""
    with contextlib.redirect_stdout(io.StringIO()):
        return _seconds_of(lambda: app.main(arguments))


def _seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


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
