"""One job of two ranks on one host: started as a user starts it, killed again and again, and started again."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOOKS = Path(__file__).parent / "hooks"
RANKS = 2
STEPS = 100_000
DEADLINE_SECONDS = 120.0
RELAUNCHED = ("torchrun", "host")
"""The kills after which the command is run again; after others torchrun starts the ranks again."""
POLL_SECONDS = 0.02
"""The moments come from the ranks; this only says when to continue."""
PARTS = {
    "start": "process",
    "imports": "imported",
    "rendezvous": "met",
    "build": "built",
    "load": "loaded",
    "step": "trained",
}
"""Each part of a start, and the moment that ends it."""

PLAIN = ("dcp", "torch.save", "nvrx")
"""Contenders that plain_loop.py trains."""
FRESH = "fresh"
"""The trainer without checkpoints."""
TORCHFT = "torchft"
CONTENDERS = ("ours, disk", "ours, memory", *PLAIN, TORCHFT)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The sizes of a Llama, and of a rank's batch."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    batch_size: int
    seq_len: int
    vocab_size: int = 258

    def config_json(self) -> dict[str, Any]:
        """Return the content of config.json, as transformers has it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "intermediate_size": self.ffn_dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
        }

    def sizes(self) -> str:
        """Return the arguments of ModelArgs, as JSON."""
        given = dataclasses.asdict(self)
        return json.dumps({name: value for name, value in given.items() if name not in ("batch_size", "seq_len")})


@dataclass(frozen=True)
class Times:
    """The parts of the time to the first trained step, in seconds, and what was lost and sent."""

    kill: str
    parts: dict[str, float]
    lost_steps: int = 0
    sent_bytes: int = 0
    """By all hosts, from the kill to that step."""


class NotResumed(Exception):
    """The job ended, or trained no step for too long: the text has the end of its output."""


class KilledJob:
    """The job of `contender` in `folder`. A context manager that ends it."""

    def __init__(self, folder: Path, contender: str, model: Model, interval: int) -> None:
        self._folder, self._contender, self._model, self._interval = folder, contender, model, interval
        self._times = folder / "times.jsonl"
        self._read: list[dict[str, Any]] = []
        self._num_read_bytes = 0
        # In a folder of its own: the dump folder gets a config.json, too.
        self._model_file = folder / "model" / "config.json"
        self._launcher: subprocess.Popen[bytes] | None = None
        # An address of a socket is short.
        self._runtime = Path(tempfile.mkdtemp(prefix="ttl-"))

    def __enter__(self) -> KilledJob:
        self._folder.mkdir()
        model = json.dumps(self._model.config_json())
        self._model_file.parent.mkdir()
        self._model_file.write_text(model, encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        shutil.rmtree(self._runtime, ignore_errors=True)  # A keeper ends when its socket is removed.

    def start_fresh(self) -> Times:
        """Start the job. Return the parts of the time to its first step."""
        began = self._launch(max_restarts=0)
        self._wait(lambda: self._trained() > 0)
        return Times("", self._parts(began))

    def killed(self, kind: str, times: int, drawn: random.Random) -> Iterator[Times]:
        """Start the job and kill it `times` times as `kind` says, in the second interval of each start."""
        self._launch(max_restarts=0 if kind in RELAUNCHED else times)
        resumed = 0
        for _ in range(times):
            last = resumed + self._interval + 1 + drawn.randrange(self._interval)
            self._wait(lambda last=last: self._trained() >= last)  # type: ignore[misc]
            began, sent = time.clock_gettime(time.CLOCK_BOOTTIME), self._sent_bytes()
            kill = self._kill(kind)
            if kind in RELAUNCHED:
                self._launch(max_restarts=0)
            trained = max(line["step"] for line in self._lines() if line["what"] == "trained" and line["at"] <= began)
            self._wait(lambda began=began: any(self._is_new(line, began, "trained") for line in self._lines()))  # type: ignore[misc]
            resumed = min(line["step"] for line in self._lines() if self._is_new(line, began, "trained")) - 1
            yield Times(kill, self._parts(began), max(0, trained - resumed), self._sent_bytes() - sent)

    def _kill(self, kind: str) -> str:
        """Kill as `kind` says; return what that was."""
        pids = {line["rank"]: line["pid"] for line in self._lines()}
        if kind == "torchrun":
            assert self._launcher is not None
            self._launcher.kill()
        for rank in range(RANKS - 1, -1, -1):
            # Of torchft the one that is measured: the other one trains on.
            if kind != "rank" or rank == (0 if self._contender == TORCHFT else RANKS - 1):
                os.kill(pids[rank], signal.SIGKILL)
        if kind == "torchrun":
            assert self._launcher is not None
            self._launcher.wait(DEADLINE_SECONDS)
        return kind

    def _sent_bytes(self) -> int:
        """Return what hosts sent so far: one host sends nothing."""
        return 0

    def _parts(self, began: float) -> dict[str, float]:
        """Return the parts of the start of rank 0 after `began`."""
        at = began
        parts = {}
        pid = next(line["pid"] for line in self._lines() if self._is_new(line, began, "process"))
        lines = [line for line in self._lines() if line["pid"] == pid]
        for part, moment in PARTS.items():
            reached = next(line["at"] for line in lines if line["what"] == moment)
            parts[part] = reached - at
            at = reached
        return parts

    def _is_new(self, line: dict[str, Any], began: float, what: str) -> bool:
        """Return whether `line` is about `what` of a start of rank 0 after `began`. Processes start in ticks."""
        if line["rank"] != 0 or line["what"] != what:
            return False
        processes = {other["pid"]: other["at"] for other in self._read if other["what"] == "process"}
        return bool(processes[line["pid"]] > began - 0.02)

    def _trained(self) -> int:
        """Return the step that rank 0 trained last, in its latest start."""
        steps = [line["step"] for line in self._lines() if line["what"] == "trained" and line["rank"] == 0]
        return steps[-1] if steps else 0

    def _lines(self) -> list[dict[str, Any]]:
        """Return all lines so far. Reads only new ones: the job needs the cores, and this is called all the time."""
        with suppress(FileNotFoundError), self._times.open("rb") as file:
            file.seek(self._num_read_bytes)
            whole, _, _ = file.read().rpartition(b"\n")
            self._read += [json.loads(line) for line in whole.splitlines()]
            self._num_read_bytes += len(whole) + 1 if whole else 0
        return self._read

    def _launch(self, max_restarts: int) -> float:
        began = time.clock_gettime(time.CLOCK_BOOTTIME)
        environment = {**os.environ, **self._variables(), "XDG_RUNTIME_DIR": str(self._runtime)}
        environment |= {"MAX_RESTARTS": str(max_restarts), "NGPU": str(RANKS)}
        place = ["--standalone", "--local-addr=localhost", f"--nproc-per-node={RANKS}"]
        command = self._command([*place, f"--max-restarts={max_restarts}"])
        if self._contender == TORCHFT:
            sizes = (self._model.sizes(), STEPS, self._model.batch_size, self._model.seq_len)
            script = Path(__file__).with_name("torchft_loop.py")
            command = [sys.executable, str(script), str(max_restarts), *map(str, sizes)]
        with self.log.open("ab") as output:
            self._launcher = subprocess.Popen(command, env=environment, cwd=self._folder, stdout=output, stderr=output)
        return began

    @property
    def log(self) -> Path:
        """The output of the job."""
        return self._folder / "output.log"

    def _variables(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH", "")]))
        return {
            "PYTHON": sys.executable,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "BENCH_RESTART_TIMES": str(self._times),
        }

    def _command(self, launch: Sequence[str]) -> list[str]:
        """Return the command of the job; torchrun of a plain loop has the options `launch`."""
        model = self._model
        if self._contender in PLAIN:
            torchrun = [sys.executable, "-m", "torch.distributed.run", *launch]
            numbers = (self._interval, STEPS, model.batch_size, model.seq_len)
            script = [str(Path(__file__).with_name("plain_loop.py")), self._contender, model.sizes()]
            return [*torchrun, *script, str(self._folder / "checkpoint"), *map(str, numbers)]
        return [
            str(ROOT / "run_train.sh"),
            f"--model.config_path={self._model_file}",
            f"--job.dump_folder={self._folder}",
            f"--training.steps={STEPS}",
            f"--training.batch_size={model.batch_size}",
            f"--training.seq_len={model.seq_len}",
            "--metrics.no_enable_tensorboard",
            f"--checkpoint.interval={self._interval}",
            "--checkpoint.keep_latest_k=2",
            *self._own_keys(),
        ]

    def _own_keys(self) -> list[str]:
        if self._contender == FRESH:
            return ["--checkpoint.no_enable_checkpoint"]
        if self._contender == "ours, memory":
            return ["--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.memory_interval=1"]
        return []

    def _end(self) -> None:
        if self._launcher is None:
            return
        self._launcher.kill()
        self._launcher.wait(DEADLINE_SECONDS)
        for pid in {line["pid"] for line in self._lines()}:
            if _runs(pid, self._times):
                os.kill(pid, signal.SIGKILL)

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            if time.monotonic() > deadline or self._has_ended():
                output = self.log.read_text(encoding="utf-8", errors="replace")
                raise NotResumed(f"the job has ended, or hangs:\n{output[-4000:]}")
            time.sleep(POLL_SECONDS)

    def _has_ended(self) -> bool:
        return self._launcher is not None and self._launcher.poll() is not None


def _runs(pid: int, times: Path) -> bool:
    """Return whether `pid` still is a rank of the job that writes `times`."""
    try:
        return str(times).encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
