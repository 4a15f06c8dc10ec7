"""Dump folders for the tests of the report, written without a job."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.cli.folders import add_step

BEGUN = 1_800_000_000.0
STEP_SECONDS = 0.25
CONFIG = {
    "job": {"description": "A run", "dump_folder": "outputs"},
    "model": {"name": "llama3", "flavor": "debugmodel"},
    "optimizer": {"lr": 8e-4},
    "training": {"steps": 60, "dataset_path": ""},
    "checkpoint": {"folder": "checkpoint", "interval": 10},
}


def metric(step: int, *, loss: float | None = None, seconds: float = STEP_SECONDS) -> dict[str, Any]:
    """Return the line of `step` as the trainer writes it."""
    return {
        "step": step,
        "loss_metrics/global_avg_loss": 2 + 4 * math.exp(-step / 20) if loss is None else loss,
        "goodput(%)": 90.0,
        "throughput(tps)": 1234.5,
        "time_metrics/end_to_end(s)": seconds,
        "time_metrics/forward(s)": 0.4 * STEP_SECONDS,
        "time_metrics/backward(s)": 0.5 * STEP_SECONDS,
        "time_metrics/optimizer(s)": 0.1 * STEP_SECONDS,
        "time_metrics/data_loading(s)": 0.0,
    }


def saved(step: int, at: float, *, nbytes: int = 10_000_000, seconds: float = 0.2, stall: float = 0.05) -> list[dict]:
    """Return the events of a save that began at `at`."""
    return [
        {"event": "save_started", "step": step, "time": at, "kind": "full"},
        {"event": "staged", "step": step, "time": at + stall, "stall_seconds": stall},
        {
            **{"event": "committed", "step": step, "time": at + seconds, "kind": "full"},
            **{"bytes": nbytes, "seconds": seconds, "stall_seconds": stall},
            **{"slowest_rank": 1, "slowest_seconds": seconds / 2},
        },
    ]


def loaded(step: int, at: float) -> list[dict[str, Any]]:
    """Return the events of a resume."""
    return [
        {"event": "load_started", "step": step, "time": at, "path": "p"},
        {"event": "loaded", "step": step, "time": at + 0.5, "path": "p", "seconds": 0.5, "bytes": 10_000_000},
        {"event": "resumed", "step": step, "time": at + 0.6},
    ]


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def ledger(*times: float) -> list[dict[str, Any]]:
    """Return the first lines of starts that began at `times`."""
    return [{"record": "start", "start": str(number), "time": time} for number, time in enumerate(times)]


def counted(name: str, began: float, loaded_step: int, last: dict[str, Any], **seconds: float) -> list[dict[str, Any]]:
    """Return the lines of a start that began training after `loaded_step`; `last` is its last one."""
    origin = {"from": "checkpoint" if loaded_step else "fresh"}
    return [
        {"record": "start", "start": name, "time": began},
        {"record": "loaded", "start": name, "time": began + 0.9, "step": loaded_step} | origin,
        {"start": name, "seconds": seconds} | last,
    ]


def killed_and_resumed(folder: Path) -> Path:
    """Write a run of 60 steps that was killed after step 34, resumed from 30, left at 45, and finished.

    Step 10 was purged, step 40 found damaged by the last start, which had another learning rate.
    """
    at = BEGUN
    events = [*saved(10, at + 3), *saved(20, at + 6, seconds=0.4), *saved(30, at + 9)]
    events += [*loaded(30, at + 100), *saved(40, at + 104, stall=0.125)]
    events.append({"event": "purged", "step": 10, "time": at + 104.3, "bytes": 10_000_000})
    events += [*saved(45, at + 106), {"event": "preempted", "step": 45, "time": at + 107, "signal": 15}]
    events += loaded(45, at + 200) + saved(50, at + 203) + saved(60, at + 206, seconds=0.1)
    events.append({"event": "finished", "step": 60, "time": at + 207})
    write_lines(folder / "events.jsonl", events)
    beat, left = {"record": "beat", "time": at + 11, "step": 34}, {"record": "end", "time": at + 107, "step": 45}
    finished = {"record": "end", "time": at + 207, "step": 60, "why": "finished"}
    lines = counted("a", at, 0, beat, productive=8.5, saving=0.15, starting=2.35)
    lines += counted(
        "b", at + 99, 30, left | {"why": "preempted"}, productive=2.75, redone=1, saving=0.175, loading=0.5
    )
    lines += counted("c", at + 199, 45, finished, productive=3.75, saving=0.1, loading=0.5, other=3.65)
    write_lines(folder / "ledger.jsonl", lines)
    stalls = {
        11: 0.05,
        21: 0.05,
        41: 0.125,
        51: 0.05,
    }  # Steps 31 and 46 are of a start that loaded what was saved before.
    write_lines(
        folder / "metrics.jsonl",
        (metric(step, seconds=STEP_SECONDS + stalls.get(step, 0.0)) for step in range(1, 61)),
    )
    root = folder / "checkpoint"
    for step, moment in ((20, 6), (30, 9), (45, 106), (50, 203), (60, 206)):
        add_step(root, step, created_at=at + moment)
    add_step(root, 40, name="step-40.corrupt", created_at=at + 104)
    last = CONFIG | {"optimizer": {"lr": 4e-4}}
    write_lines(folder / "configs.jsonl", [{"time": at, "config": CONFIG}, {"time": at + 199.1, "config": last}])
    (folder / "config.json").write_text(json.dumps(last))
    return folder


def long_run(folder: Path, num_lines: int, *, save_every: int) -> Path:
    """Write a run of `num_lines` logged steps with a spike of the loss at step 777,777 or the last one before it."""
    folder.mkdir(parents=True)
    spike = min(777_777, num_lines - 1)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as lines:
        for step in range(1, num_lines + 1):
            loss = 99.0 if step == spike else 2 + 4 * math.exp(-step / 1e5) + 0.1 * math.sin(step)
            lines.write(json.dumps(metric(step, loss=loss)) + "\n")
    events = [
        event
        for step in range(save_every, num_lines + 1, save_every)
        for event in saved(step, BEGUN + step * STEP_SECONDS)
    ]
    write_lines(folder / "events.jsonl", events)
    return folder


def copy_of(folder: Path, other: Path) -> Path:
    shutil.copytree(folder, other)
    return other
