"""Kill training jobs on a file system, and see whether a step that was saved is ever lost, wrong, or in the way.

    python scripts/try_file_system.py FOLDER [--second MOUNT] [--kills 20] [--seed 0]

FOLDER is on the file system, MOUNT is the same folder through another client of it: then rank 1, and each second start,
work through that one. A job is one rank or two, in one of the three modes, with a state that is known for every step;
each is killed at a point of a save or a load, or after a random time, and the next one must resume from a step that
was acknowledged last, or a later one, with the right values. After the kills a step is saved again, from before it, as
often. Prints a line of JSON with what was drawn, and counts: `lost`, `wrong`, `left`. At last it removes a step itself,
which has to count as lost.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # What gloo says of ranks that are killed.

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan_lite import faults
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.disk.mounts import mount_of
from torchtitan_lite.store.layout import parse_step

MODES = ("disabled", "async", "async_with_pinned_mem")
POINTS = ("save", "plan", "stage", "open", "write", "fsync", "metadata", "manifest", "seal", "commit", "committed")
POINTS += ("purge", "recover", "load", "listing", "read", "lease", "heartbeat")
STEPS = 6
"""That a job makes beyond the one that it resumes from."""
SHAPE = (256, 1024)
LIMIT_SECONDS = 90.0
"""For one job."""
_GRACE_SECONDS = 1.0
KNOWN = ("folder.id", "writer.lock")


@dataclass(frozen=True)
class Job:
    """One start: its ranks, and when it is killed."""

    mode: str
    num_ranks: int
    killed_at: str
    """A point, or seconds after the start; empty for no kill."""
    rank: int
    """Which is killed; the others get SIGKILL with it."""
    load_step: int = -1


def value_at(step: int) -> float:
    """Return what every element of the state is after `step`: a sum of numbers that floats hold exactly."""
    return sum((number % 7 + 1) / 8 for number in range(step))


def main() -> int:
    """Return 1 if a step was lost, wrong or left in the way, else 0."""
    options = _options()
    mounts = [options.folder.absolute(), (options.second or options.folder).absolute()]
    drawn = random.Random(options.seed)
    counts = dict.fromkeys(("kills", "ended", "lost", "wrong", "left", "again", "again_failed"), 0)
    acknowledged = 0
    for number in itertools.count():
        if counts["kills"] == options.kills:
            break
        killed_at = drawn.choice([*POINTS, *(f"{drawn.uniform(0.1, 3):.2f}" for _ in POINTS)])
        job = Job(drawn.choice(MODES), drawn.choice((1, 2)), killed_at, drawn.randrange(2))
        acknowledged = _tried(job, mounts, number, acknowledged, counts)
    acknowledged = _tried(Job("disabled", 1, "", 0), mounts, 0, acknowledged, counts)
    left = [path.name for path in mounts[0].iterdir() if parse_step(path.name) is None and path.name not in KNOWN]
    counts["left"] += len(left)
    for number in range(options.again):
        # From two steps before: its last ones are saved again, under the same names.
        job = Job(MODES[number % 3], 2, "", 0, load_step=acknowledged - 2)
        counts["again"] += 1
        reached = _tried(job, mounts, number, 0, counts)
        counts["again_failed"] += reached < acknowledged - 2 + STEPS
        acknowledged = max(reached, 1)
    is_found = _finds_a_planted_loss(mounts, acknowledged)
    found = {"left_names": left, "planted_loss_found": is_found}
    print(json.dumps({"mount": mount_of(mounts[0]), "seed": options.seed, **counts, **found}))
    return int(any(counts[name] for name in ("lost", "wrong", "left", "again_failed")) or not is_found)


def _finds_a_planted_loss(mounts: list[Path], acknowledged: int) -> bool:
    """Remove the step that was acknowledged last; return whether it counts as lost."""
    steps = [(step, path) for path in mounts[0].iterdir() if (step := parse_step(path.name)) is not None]
    shutil.rmtree(max(steps)[1])
    counts = dict.fromkeys(("kills", "ended", "lost", "wrong"), 0)
    print("Now a planted loss:", flush=True)
    _tried(Job("disabled", 1, "", 0), mounts, 0, acknowledged, counts)
    return counts["lost"] == 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder on the file system")
    parser.add_argument("--second", type=Path, help="the same folder through another client")
    parser.add_argument("--kills", type=int, default=20, help="jobs that are killed (20)")
    parser.add_argument("--again", type=int, default=3, help="times that steps are saved again (3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    options = parser.parse_args()
    if any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty: name an empty folder, which this fills and removes from")
    return options


def _tried(job: Job, mounts: list[Path], number: int, acknowledged: int, counts: dict[str, int]) -> int:
    """Run `job`, and count what it showed; return the last step that any job acknowledged."""
    said = _run(job, mounts if number % 2 == 0 else mounts[::-1])
    is_killed = "ended" not in said
    counts["kills" if job.killed_at and is_killed else "ended"] += 1
    loaded = [int(each.split()[1]) for each in said if each.startswith("loaded")]
    saved = [int(each.split()[1]) for each in said if each.startswith("saved")]
    expected = acknowledged if job.load_step == -1 else job.load_step
    problems = [each for each in said if each.startswith(("wrong", "raised"))]
    counts["wrong"] += len(problems)
    if any(step < expected for step in loaded):
        counts["lost"] += 1
        problems.append(f"step {expected} was acknowledged, {loaded} was loaded")
    if not job.killed_at and is_killed:
        counts["wrong"] += 1
        problems.append("it did not end")
    if problems:
        print(f"{job}: {'; '.join(problems)}\n    {'; '.join(said)}", flush=True)
    return max([*saved, *loaded, 0 if job.load_step != -1 else acknowledged])


def _run(job: Job, mounts: list[Path]) -> list[str]:
    """Return what the ranks of `job` said, in order."""
    read_end, write_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    pids = []
    for rank in range(job.num_ranks):
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            _rank(job, rank, mounts[rank], port, write_end)
        pids.append(pid)
    os.close(write_end)
    _wait(pids, float(job.killed_at) if job.killed_at[:1].isdecimal() else None)
    with open(read_end, encoding="utf-8") as pipe:  # noqa: PTH123  # a descriptor
        return pipe.read().splitlines()


def _wait(pids: list[int], seconds: float | None) -> None:
    """Wait for all of `pids`; kill them after `seconds`, soon after one was killed or failed, and if it takes long."""
    began, left, until = time.monotonic(), [*pids], LIMIT_SECONDS if seconds is None else seconds
    while left:
        passed = time.monotonic() - began
        ended = [(pid, os.waitpid(pid, os.WNOHANG)) for pid in left]
        left = [pid for pid, (found, _) in ended if not found]
        if any(found and status for _, (found, status) in ended):
            until = min(until, passed + _GRACE_SECONDS)
        if passed > until:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return
        time.sleep(0.01)


def _rank(job: Job, rank: int, folder: Path, port: int, pipe: int) -> None:
    """Be `rank` of `job`; never returns."""

    def say(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    code = 1
    try:
        if job.num_ranks > 1:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(job.num_ranks), "LOCAL_RANK": str(rank)}
            dist.init_process_group("gloo")
        if job.killed_at and not job.killed_at[:1].isdecimal() and rank == job.rank % job.num_ranks:
            faults.install(f"kill@{job.killed_at}:after={random.Random(str(job)).randrange(4)}")
        _train(job, rank, folder, say)
        say("ended")
        code = 0
    except BaseException as error:
        say(f"raised {type(error).__name__}: {str(error)[:300]}" if not job.killed_at else f"killed by {error!r:.200}")
        traceback.print_exc(file=sys.stderr) if not job.killed_at else None
    finally:
        os._exit(code)


def _train(job: Job, rank: int, folder: Path, say: object) -> None:
    assert callable(say)
    model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    nn.init.zeros_(model.weight)
    if job.num_ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (job.num_ranks,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"step": 0}
    options = {"interval": 1, "keep_latest_k": 3, "async_mode": job.mode, "memory_ttl_seconds": 0}
    if job.load_step != -1:
        options |= {"load_step": job.load_step, "new_branch": True}

    def on_event(event: str, step: int, **_: object) -> None:
        if event == "committed" and rank == 0:
            say(f"saved {step}")

    with CheckpointManager.for_loop(
        model=model, optimizer=optimizer, states={"s": state}, folder=folder, on_event=on_event, **options
    ) as manager:
        manager.load()
        weight = local_of(model.weight).detach()
        say(f"loaded {state['step']}")
        if not weight.eq(-value_at(state["step"])).all():
            say(f"wrong values at step {state['step']} on rank {rank}")
        manager.reset()
        last = state["step"] + STEPS
        while state["step"] < last:
            manager.maybe_wait_for_staging()
            gradient = (state["step"] % 7 + 1) / 8
            model.weight.grad = torch.full_like(model.weight, gradient)
            optimizer.step()
            state["step"] += 1
            manager.save(state["step"], force=state["step"] == last)


if __name__ == "__main__":
    sys.exit(main())
