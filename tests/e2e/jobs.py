"""Real jobs for end-to-end tests: `train.py`, as processes of their own.

A job's workers are forked from a server that has the trainer loaded, each with the variables that torchrun would set.
Tests of the start itself use cold processes, with or without torchrun. Tests watch a job through the files that it
writes, with a deadline on every wait; processes that still run at the end of a test are killed.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.forked import FORKED_RANKS, REPO, Forked, run_module, run_script
from tests.processes import DEADLINE_SECONDS, children, own_children, read_lines, send, wait_until

TINY = [
    "--job.config_file=llama_debug.toml",
    "--metrics.log_freq=1",
    "--metrics.no_enable_tensorboard",
    "--training.batch_size=2",
    "--training.seq_len=64",
]


CONFIG = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260, "rms_norm_eps": 1e-5},
    **{"rope_theta": 500000.0, "max_position_embeddings": 8192},
}
"""A config.json of a Llama, as a model in Hugging Face's format has it."""

Process = subprocess.Popen[str] | Forked


class Job:
    """The processes of one job, and the files in its dump folder."""

    def __init__(
        self, processes: Sequence[Process], dump_folder: Path, log: Path, under_torchrun: bool = False
    ) -> None:
        self.processes = list(processes)
        self.dump_folder = dump_folder
        self.log_file = log
        self._under_torchrun = under_torchrun

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.dump_folder / "checkpoint").glob("*"))

    def events(self, event: str | None = None) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.dump_folder / "events.jsonl") if event in (None, line["event"])]

    def losses(self) -> dict[int, float]:
        lines = read_lines(self.dump_folder / "metrics.jsonl")
        return {line["step"]: line["loss_metrics/global_avg_loss"] for line in lines}

    def workers(self) -> list[int]:
        """Return the process ids of the workers: those under torchrun, or the processes themselves."""
        ids = [process.pid for process in self.processes]
        return [child for pid in ids for child in own_children(pid)] if self._under_torchrun else ids

    def wait_until(self, condition: Callable[[Job], Any]) -> None:
        """Return as soon as `condition` holds. Fail if the job ends before, or at a deadline."""
        is_met = wait_until(lambda: condition(self), lambda: self.log, lambda: not self.pids())
        assert is_met, f"the job ended before:\n{self.log}"

    def wait_for_step(self, step: int) -> None:
        """Return as soon as `step` is trained."""
        self.wait_until(lambda job: max(job.losses(), default=0) >= step)

    def wait(self) -> list[int]:
        """Wait until all processes have ended. Return their exit codes."""
        return [process.wait(DEADLINE_SECONDS) for process in self.processes]

    def kill(self) -> None:
        """Send SIGKILL to all processes at once, as a power cut would end them."""
        for pid in [*(child for process in self.processes for child in children(process.pid)), *self.pids()]:
            send(pid, signal.SIGKILL)
        self.wait()

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.poll() is None]


@contextmanager
def start(
    dump_folder: Path,
    *arguments: str,
    ranks: int = 1,
    torchrun: Sequence[str] | None = None,
    environment: dict[str, str] | None = None,
    cold: bool = False,
    script: Path = REPO / "train.py",
) -> Iterator[Job]:
    """Start a job of `ranks` workers of `script`, which is killed at the end of the block.

    `torchrun`: the workers run under torchrun with these options, which forks them. `cold`: each worker, and torchrun,
    is a new Python process.
    """
    dump_folder.mkdir(parents=True, exist_ok=True)
    training = [str(script), *TINY, f"--job.dump_folder={dump_folder}", *arguments]
    log = dump_folder.with_suffix(".log")
    base = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    port = str(free_port())
    environments = [base | (_rank_variables(rank, ranks, port) if ranks > 1 else {}) for rank in range(ranks)]
    log.write_text("")
    processes: list[Process]
    if torchrun is not None:
        launcher, rendezvous = "torch.distributed.run", ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        options = [f"--nproc_per_node={ranks}", *rendezvous, *torchrun, *training]
        if cold:
            processes = [_cold([sys.executable, "-m", launcher, *options], base, log)]
        else:
            processes = [run_module(launcher, options, log, base | FORKED_RANKS)]
    elif cold:
        processes = [_cold([sys.executable, *training], each, log) for each in environments]
    else:
        processes = [run_script(script, training[1:], log, each) for each in environments]
    job = Job(processes, dump_folder, log, under_torchrun=torchrun is not None)
    try:
        yield job
    finally:
        job.kill()


def run(dump_folder: Path, *arguments: str, ranks: int = 1, **options: Any) -> Job:
    """Run a job to its end. Fail unless all workers exit with 0."""
    with start(dump_folder, *arguments, ranks=ranks, **options) as job:
        codes = job.wait()
    assert codes == [0] * len(codes), job.log
    return job


def _cold(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[str]:
    with log.open("a") as output:
        return subprocess.Popen(command, env=environment, cwd=REPO, stdout=output, stderr=subprocess.STDOUT, text=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def _rank_variables(rank: int, ranks: int, port: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
