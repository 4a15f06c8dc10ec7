"""Starts of a small job in processes of their own, which end by SIGKILL: what is left is the disk and the keeper."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.checkpoint.companions import kept
from tests.forked import Forked
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.store import rank_records

WAIT_SECONDS = 60.0
"""The longest wait for an image, which takes milliseconds on an idle machine."""
KILLED = -signal.SIGKILL


def run(
    folder: Path, until: int, *, kills: bool = True, ranks: int = 1, hosts: Sequence[str] = (), **checkpoint: Any
) -> Start:
    """Train up to step `until` in other processes, which then kill themselves, or close; return what rank 0 did.

    `hosts` are folders for the sockets of keepers, one for each rank: ranks with different ones see different memory.
    With `waits_for_memory` each step waits only until the memory for images is made, not for its image.
    `width` is that of the model; with `records` each rank has a record, as in a large job.
    `kill_after` is the moment of the kill, in seconds after the load; then no step waits for its image.
    """
    number = len([*folder.parent.iterdir()])
    record, store = (folder.parent / f"{folder.name}-{number}.{end}" for end in ("jsonl", "store"))
    processes = []
    for rank in range(ranks):
        env = dict(os.environ)
        if hosts:
            Path(hosts[rank]).mkdir(exist_ok=True)
            env["XDG_RUNTIME_DIR"] = hosts[rank]
        own = record if rank == 0 else record.with_suffix(f".{rank}")
        world = (rank, ranks, str(store))
        processes.append(Forked(_train, str(folder), until, kills, env, checkpoint, str(own), world))
    codes = [process.wait(2 * WAIT_SECONDS) for process in processes]
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    for path in folder.parent.glob(f"{record.stem}.*"):
        path.unlink()
    return Start(codes[0], lines)


class Start:
    """What one start did."""

    def __init__(self, code: int, lines: list[dict[str, Any]]) -> None:
        self.code = code
        self.lines = lines

    @property
    def loaded(self) -> tuple[int, str] | None:
        """The step that it loaded, and from where; None for a fresh start."""
        found = [line for line in self.lines if line["event"] == "loaded"]
        return (found[-1]["step"], found[-1]["origin"]) if found else None

    @property
    def ready(self) -> int:
        """The last step that became an image, 0 for none."""
        return max((line["step"] for line in self.lines if line["event"] == "image_ready"), default=0)

    @property
    def weights(self) -> dict[int, str]:
        """The first weight after each step that it trained, exactly."""
        return {line["step"]: line["weight"] for line in self.lines if line["event"] == "trained"}

    @property
    def loaded_weight(self) -> str:
        """The first weight after the load, exactly."""
        return next(line["weight"] for line in self.lines if line["event"] == "begun")

    @property
    def error(self) -> str:
        return next((line["text"] for line in self.lines if line["event"] == "error"), "")

    @property
    def log(self) -> str:
        return "\n".join(line["text"] for line in self.lines if line["event"] == "log")


def _train(
    folder: str,
    until: int,
    kills: bool,
    env: dict[str, str],
    checkpoint: dict[str, Any],
    record: str,
    world: tuple[int, int, str],
) -> None:
    import logging

    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    os.environ.clear()
    os.environ.update(env)
    fd = os.open(record, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    done = threading.Condition()
    settled: set[int] = set()

    def write(event: str, step: int = -1, /, **figures: Any) -> None:
        figures = {name: value for name, value in figures.items() if isinstance(value, str | int | float)}
        os.write(fd, (json.dumps({"event": event, "step": step, **figures}) + "\n").encode())
        if event == "image_ready":
            note(step)

    def note(step: int) -> None:
        with done:
            settled.add(step)
            done.notify_all()

    class Lines(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            write("log", text=entry.getMessage())
            if "gets no image" in entry.getMessage():
                note(int(entry.args[0]))  # type: ignore[index, arg-type]  # its first argument is the step

    logging.getLogger("torchtitan_lite").addHandler(Lines())
    logging.getLogger("torchtitan_lite").setLevel(logging.DEBUG)
    torch.manual_seed(0)
    if checkpoint.pop("records", False):
        rank_records.FROM_RANKS = 1
    width = checkpoint.pop("width", 7)
    model = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))
    rank, world_size, store = world
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        fully_shard(model)

    def weight() -> str:
        whole = model[0].weight.full_tensor() if world_size > 1 else model[0].weight
        return float(whole[0, 0].detach()).hex()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings = {"interval": 1000, "async_mode": "async", "memory_interval": 1, **checkpoint}
    load, finishes = settings.pop("load", -1), settings.pop("finishes", False)
    kill_after = settings.pop("kill_after", None)
    waits_for_memory = settings.pop("waits_for_memory", False)
    waits = bool(settings["memory_interval"]) and kill_after is None and not waits_for_memory
    try:
        manager = CheckpointManager.for_loop(
            model=model, optimizer=optimizer, folder=folder, on_event=write, **settings
        )
        with manager:
            manager.load(load)
            write("begun", manager.loaded_step or 0, weight=weight())
            if kill_after is not None:
                threading.Timer(kill_after, os.kill, (os.getpid(), signal.SIGKILL)).start()
            for step in range((manager.loaded_step or 0) + 1, until + 1):
                batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                write("trained", step, weight=weight())
                stager = None if (found := kept(manager)) is None else found.stager
                if waits and stager is not None and step > 1:
                    stager.finish_preparation()
                manager.save(step, force=finishes and step == until)
                if waits and stager is not None and step > 1 and not (finishes and step == until):
                    with done:
                        assert done.wait_for(lambda step=step: step in settled, WAIT_SECONDS), f"no image of {step}"
                if step % settings["interval"] == 0:
                    manager.wait()
                if waits_for_memory and stager is not None:
                    stager.finish_preparation()
                    for thread in threading.enumerate():
                        if thread.name in ("checkpoint", "former images"):
                            thread.join(WAIT_SECONDS)
            if world_size > 1:
                dist.barrier()
            if kills:
                os.kill(os.getpid(), signal.SIGKILL)
    except Exception as error:
        write("error", text=f"{type(error).__name__}: {error}")
        raise
