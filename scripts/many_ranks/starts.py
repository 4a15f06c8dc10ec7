"""Starts of a job of many ranks on one machine: each rank a forked process that records what it does, and when."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from socket import IPPROTO_TCP, TCP_INFO, create_server, socket
from struct import unpack_from
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from tests.forked import Forked
from tests.processes import read_lines
from torchtitan_lite import faults, log
from torchtitan_lite.checkpoint.format.shards import local_of
from torchtitan_lite.config import job_config as sections
from torchtitan_lite.distributed.lost_peer import naming_lost_peers
from torchtitan_lite.distributed.process_group import World, process_group
from torchtitan_lite.store import layout
from torchtitan_lite.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
START, STEPS = 2, 4
"""The step that starts resume, and the last one of a straight run."""
END_SECONDS_PER_RANK = 8.0
"""Of a start, at most."""
KNOWN = ("folder.id", layout.LOCK)
COUNTERS = (("Q", 128), ("II", 152), ("Q", 200))
"""Of linux/tcp.h, at which offsets: tcpi_bytes_received; tcpi_data_segs_in and _out; tcpi_bytes_sent."""
TRAFFIC = ("messages_out", "bytes_out", "messages_in", "bytes_in")


@dataclass(frozen=True)
class Start:
    """One start of a job, from the fork of its ranks to their end."""

    folder: Path
    layout: str
    ranks: int
    steps: int = STEPS
    only_loads: bool = False
    """Whether it ends after the load."""
    fault: str = ""
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    hang_seconds: int = 0
    port: int = 0

    def config(self) -> sections.JobConfig:
        """Return its configuration; the data are the pages of the documentation."""
        return sections.JobConfig(
            job=sections.Job(dump_folder=str(self.folder)),
            metrics=sections.Metrics(log_freq=1, enable_tensorboard=False),
            model=sections.Model(dropout=0.1),
            comm=sections.Comm(hang_seconds=self.hang_seconds),
            lr_scheduler=sections.LRScheduler(warmup_steps=2, decay_ratio=0.0),
            training=sections.Training(
                dataset="text",
                dataset_path=str(ROOT / "docs" / "*.md"),
                batch_size=4 if self.layout.startswith("PP") else 1,
                global_batch_size=self.ranks,
                seq_len=16,
                steps=self.steps,
                seed=7,
                mixed_precision_param="float32",
            ),
            parallelism=sections.Parallelism(**layouts(self.ranks)[self.layout]),
            activation_checkpoint=sections.ActivationCheckpoint(mode="none"),
            checkpoint=sections.Checkpoint(enable_checkpoint=True, **{"interval": 1, **self.checkpoint}),
        )


def layouts(ranks: int) -> dict[str, dict[str, int]]:
    """Return the keys of [parallelism] of each layout."""
    replicas = 2 ** ((ranks.bit_length() - 1) // 2)
    return {
        f"FSDP2 {ranks}": {},
        f"HSDP {replicas} x {ranks // replicas}": {"data_parallel_replicate_degree": replicas},
        f"TP 2 x FSDP {ranks // 2}": {"tensor_parallel_degree": 2},
        f"PP 4 x FSDP {ranks // 4}": {"pipeline_parallel_degree": 4},
    }


class Recorded(Trainer):
    """A trainer that says what it does, with the digest of its local state, and counts what saves and loads take."""

    def __init__(self, config: sections.JobConfig, world: World, say: Callable[..., None], *, only_loads: bool) -> None:
        super().__init__(config, world)
        self._say, self._ends = say, only_loads
        self.checkpointer.save = self._counted("save", self.checkpointer.save)  # type: ignore[method-assign]
        self.checkpointer.load = self._counted("load", self.checkpointer.load)  # type: ignore[method-assign]

    def _resume(self) -> None:
        super()._resume()
        self._say("resumed", step=self.train_state.step, digest=self._digest())

    def _note_progress(self) -> None:
        super()._note_progress()
        losses = [self.measured[name].item().hex() for name in ("loss", "grad_norm")]
        self._say("trained", step=self.train_state.step, losses=losses, digest=self._digest())

    def _has_no_step_left(self) -> bool:
        return self._ends or super()._has_no_step_left()

    def _digest(self) -> str:
        digest = xxhash.xxh3_128(str(self.lr_schedulers[0].last_epoch).encode())
        tensors = [parameter for part in self.model_parts for parameter in part.parameters()]
        states = [state for each in self.optimizers for state in each.state.values()]
        for tensor in [*tensors, *(state[name] for state in states for name in sorted(state)), torch.get_rng_state()]:
            digest.update(local_of(tensor).detach().contiguous().numpy())
        return digest.hexdigest()

    def _counted(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def counted(*arguments: Any, **more: Any) -> Any:
            dist.barrier()
            before = [time.process_time(), *_traffic()]
            returned = call(*arguments, **more)
            taken = [after - begun for after, begun in zip([time.process_time(), *_traffic()], before, strict=True)]
            self._say(what, **dict(zip(("cpu_seconds", *TRAFFIC), taken, strict=True)))
            return returned

        return counted


def _traffic() -> list[int]:
    """Return what the TCP connections of this process have carried, as the kernel counts it: segments with data."""
    total = [0, 0, 0, 0]
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208  # numbers, not paths
        try:
            with socket(fileno=os.dup(int(fd))) as connection:
                info = connection.getsockopt(IPPROTO_TCP, TCP_INFO, 256)
        except OSError:
            continue  # No connection, or the descriptor of the listing itself.
        (received,), (come, gone), (sent,) = (unpack_from(form, info, at) for form, at in COUNTERS)
        total = [old + new for old, new in zip(total, (gone, sent, come, received), strict=True)]
    return total


def _run_rank(start: Start, rank: int) -> None:
    """Be `rank` of `start`; never returns."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": start.ranks, "LOCAL_WORLD_SIZE": start.ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": start.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in (place | meeting).items()}
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    output = os.open(start.folder / "output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    record = os.open(start.folder / f"rank{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(event: str, **more: Any) -> None:
        os.write(record, (json.dumps({"event": event, "time": time.time(), **more}) + "\n").encode())

    code = 1
    try:
        log.setup(rank)
        faults.install(start.fault, rank=rank)
        config = start.config()
        with naming_lost_peers(time_outs=False), process_group(config.comm) as world:
            ended = Recorded(config, world, say, only_loads=start.only_loads).run()
            faults.point("exit")
        code = ended
    except BaseException as error:
        say("raised", error=f"{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Ended:
    """The end of a start."""

    start: Start
    codes: list[int | None]
    """The exit codes; None of a rank that had to be killed."""
    seconds: float
    down_at: float
    """When the first rank was seen to be dead or stopped, and `down_seconds` after the start."""
    down_seconds: float
    lines: list[list[dict[str, Any]]]
    """What each rank said."""
    output: str

    def said(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return what `rank` said of `event`."""
        return [line for line in self.lines[rank] if line["event"] == event]

    def states(self) -> dict[int, dict[int, Any]]:
        """Return what each rank said of each step that it trained: losses, and the digest of its state."""
        found: dict[int, dict[int, Any]] = {}
        for rank in range(self.start.ranks):
            for line in self.said("trained", rank):
                found.setdefault(line["step"], {})[rank] = (line["losses"], line["digest"])
        return found

    @property
    def resumed(self) -> list[tuple[int, str]]:
        """The step that each rank resumed, and the digest of its state."""
        resumed = (self.said("resumed", rank) for rank in range(self.start.ranks))
        return [(line["step"], line["digest"]) for lines in resumed for line in lines]

    def committed(self) -> int:
        """Return the last step that was reported as committed, by any start in the folder; 0 for none."""
        events = read_lines(self.start.folder / "events.jsonl")
        return max((line["step"] for line in events if line["event"] == "committed"), default=0)

    def left(self) -> list[str]:
        """Return the names in the folder that are neither checkpoints, nor quarantined ones, nor known."""
        names = (path.name for path in (self.start.folder / "checkpoint").iterdir())
        return [name for name in names if not re.fullmatch(r"step-\d+(\.corrupt)?", name) and name not in KNOWN]

    def errors(self) -> dict[str, int]:
        """Return what ranks raised, the number of the rank left out, and how many did."""
        raised = (line["error"] for rank in range(self.start.ranks) for line in self.said("raised", rank))
        return dict(Counter(re.sub(r"rank \d+", "rank N", error)[:110] for error in raised))


def carried_out(start: Start, leave_seconds: float = 30.0) -> Ended:
    """Run `start` to its end. Once a rank is down, the others have `leave_seconds` to end."""
    start.folder.mkdir(parents=True, exist_ok=True)
    for path in (*start.folder.glob("rank*.jsonl"), start.folder / "output.log"):
        path.unlink(missing_ok=True)
    with create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    # As torchrun's agent does: it outlives rank 0.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    began, down_at = time.time(), 0.0
    end = began + END_SECONDS_PER_RANK * start.ranks
    ranks = [Forked(_run_rank, dataclasses.replace(start, port=port), rank) for rank in range(start.ranks)]
    try:
        while any(rank.poll() is None for rank in ranks) and time.time() < end:
            if not down_at and any(map(_is_down, ranks)):
                down_at = time.time()
                end = down_at + leave_seconds
            time.sleep(0.05)
        codes, seconds = [rank.poll() for rank in ranks], time.time() - began
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait(60)
    del store
    down_at = down_at or began + seconds
    lines = [read_lines(start.folder / f"rank{rank}.jsonl") for rank in range(start.ranks)]
    # What ranks raised once the others were killed is no notice of theirs.
    heard = [[line for line in of_rank if line["time"] <= began + seconds] for of_rank in lines]
    output = (start.folder / "output.log").read_text(errors="replace")
    return Ended(start, codes, seconds, down_at, down_at - began, heard, output)


def _is_down(rank: Forked) -> bool:
    """Return whether `rank` has failed, was killed, or is stopped."""
    if (code := rank.poll()) is not None:
        return code != 0
    try:
        return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(") ")[2][0] == "T"
    except OSError:
        return True


def linked(saved: Ended, start: Start, steps: Sequence[int] = (START,)) -> Start:
    """Put `steps` of `saved` into the folder of `start`; return `start`."""
    for step in steps:
        name = Path("checkpoint", layout.step_dir(step))
        shutil.copytree(saved.start.folder / name, start.folder / name, copy_function=os.link)
    return start


def differing(found: Ended, straight: Ended) -> list[str]:
    """Return what ranks of `found` have resumed or trained with other values than those of `straight`."""
    expected = straight.states()
    trained = [
        f"step {step} of rank {rank}"
        for step, states in found.states().items()
        for rank, state in states.items()
        if state != expected[step][rank]
    ]
    resumed = [
        f"step {line['step']}, resumed by rank {rank}"
        for rank in range(found.start.ranks)
        for line in found.said("resumed", rank)
        if line["digest"] != expected[line["step"]][rank][1]
    ]
    return trained + resumed
