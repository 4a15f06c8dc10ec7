"""Runs that nothing befell, and the comparison of a life with them."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from scripts.soaking.drawn import TOPOLOGIES, Life
from tests.e2e.jobs import CONFIG
from tests.forked import FORKED_RANKS, run_module

STEPS = 160
"""Of every life and every reference: the learning rate depends on it."""
BATCH = 4
TOLERANCE = 1e-3
"""Relative, of a loss after a change of ranks or parallelism: sums are taken in another order."""
CONTENTS_EVERY = 10
JOB = Path(__file__).with_name("job.py")


@dataclass
class Straight:
    """A run that nothing befell."""

    steps: dict[str, dict[str, Any]]
    """By step: the `loss`, the `samples`, and of each rank the digest of its `states`."""
    contents: dict[str, str]
    """By step: a digest of the checkpoint's tensors."""


@dataclass
class Compared:
    """What a comparison found."""

    wrong: list[str] = field(default_factory=list)
    trained: int = 0
    redone: int = 0


class References:
    """The straight runs of each topology and set of poisoned batches, which are left out in them; kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def of(self, topology: str, poisoned: Sequence[int]) -> Straight:
        """Return the straight run; train it where it is the first time."""
        name = "-".join([topology.replace(" ", ""), *map(str, poisoned)])
        path = self.folder / f"{name}.json"
        if not path.exists():
            straight = self._train(topology, poisoned, self.folder / f"{name}.{os.getpid()}")
            path.with_suffix(f".{os.getpid()}").write_text(
                json.dumps({"steps": straight.steps, "contents": straight.contents})
            )
            path.with_suffix(f".{os.getpid()}").rename(path)
        return Straight(**json.loads(path.read_text()))

    def content(self, checkpoint: Path) -> str:
        """Return a digest of the tensors of model and optimizer in a checkpoint, as stock DCP reads them."""
        with tempfile.NamedTemporaryFile(dir=self.folder) as file:
            dcp_to_torch_save(checkpoint, file.name)
            state = torch.load(file.name, weights_only=False)
        digest = xxhash.xxh3_64()
        for name, tensor in sorted(_tensors(state)):
            if name.startswith(("model", "optimizer")):
                digest.update(name.encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    def _train(self, topology: str, poisoned: Sequence[int], folder: Path) -> Straight:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        environment = {**os.environ, **FORKED_RANKS, "OMP_NUM_THREADS": "1", "SOAK_RECORDS": str(folder)}
        environment |= {"SOAK_START": "1", "SOAK_SKIP": ",".join(map(str, poisoned)), "TORCHTITAN_LITE_MEMORY": "off"}
        arguments = command(topology, folder / "run", {"interval": CONTENTS_EVERY, "keep_latest_k": 0}, folder)
        log = folder / "output.log"
        log.touch()
        job = run_module("torch.distributed.run", ["--monitor-interval=0.1", *arguments], log, environment)
        code = job.wait(600)
        if code:
            raise RuntimeError(f"the run that nothing befell ended with {code}:\n{log.read_text()[-3000:]}")
        steps: dict[str, dict[str, Any]] = defaultdict(lambda: {"samples": [], "states": {}})
        for path in sorted(folder.glob("rank*.jsonl")):
            for line in map(json.loads, path.read_text().splitlines()):
                if line["event"] == "trained":
                    found = steps[str(line["step"])]
                    found["loss"] = line["loss"]
                    found["samples"] = sorted([*found["samples"], *line["samples"]])
                    found["states"][path.stem.removeprefix("rank")] = line["state"]
        saved = (folder / "run/checkpoint").glob("step-*")
        contents = {path.name.removeprefix("step-"): self.content(path) for path in saved}
        shutil.rmtree(folder)
        return Straight(dict(steps), contents)


def command(topology: str, dump: Path, keys: dict[str, Any], folder: Path, *, hang_seconds: int = 0) -> list[str]:
    """Return torchrun's arguments for a start of the small Llama, with `keys` of [checkpoint]."""
    ranks, shares, parallelism = TOPOLOGIES[topology]
    config = folder / "model.json"
    config.write_text(json.dumps(CONFIG))
    arguments = [
        *(f"--nproc_per_node={ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(JOB)),
        *("--job.config_file=llama_debug.toml", f"--job.dump_folder={dump}", f"--model.config_path={config}"),
        *("--metrics.log_freq=1", "--metrics.no_enable_tensorboard", "--training.seq_len=32"),
        *(f"--training.global_batch_size={BATCH}", f"--training.batch_size={BATCH // shares}"),
        *(f"--training.steps={STEPS}", "--training.on_divergence=rollback", "--training.trace_samples"),
        *(f"--comm.hang_seconds={hang_seconds}", "--checkpoint.max_failed_saves=1000"),
        *(f"--parallelism.{key}" for key in parallelism),
    ]
    return arguments + [f"--checkpoint.{key}={'true' if value is True else value}" for key, value in keys.items()]


def follow(lines: list[dict[str, Any]], life: Life, references: References) -> Compared:
    """Compare all that the ranks of `life` trained, in the records `lines`, with the straight runs."""
    compared = Compared()
    is_exact = len(life.topologies) == 1
    straight = references.of(life.topologies[0], life.poisoned).steps
    of_step: dict[tuple[str, int, int], list[dict[str, Any]]] = defaultdict(list)
    rollbacks: Counter[tuple[str, int]] = Counter()
    for line in lines:
        if line["event"] == "rolled_back":
            rollbacks[line["start"], line["rank"]] += 1
        if line["event"] == "trained":
            of_step[line["start"], rollbacks[line["start"], line["rank"]], line["step"]].append(line)
    seen: set[int] = set()
    for (start, _, step), ranks in of_step.items():
        wanted, loss = straight[str(step)], ranks[0]["loss"]
        is_of_first = any(rank["rank"] == 0 for rank in ranks)
        compared.trained += is_of_first
        compared.redone += is_of_first and step in seen
        if is_of_first:
            seen.add(step)
        where = f"start {start}, step {step}"
        if is_exact and any(rank["loss"] != wanted["loss"] for rank in ranks):
            compared.wrong.append(f"{where}: the loss is {loss}, {wanted['loss']} in the uninterrupted run")
        elif not math.isclose(float.fromhex(loss), float.fromhex(wanted["loss"]), rel_tol=TOLERANCE):
            compared.wrong.append(f"{where}: the loss is {loss}, {wanted['loss']} in the uninterrupted run, too far")
        for rank in ranks if is_exact else []:
            if rank["state"] != wanted["states"][str(rank["rank"])]:
                compared.wrong.append(f"{where}: rank {rank['rank']} holds another state than in the uninterrupted run")
        samples = sorted(sample for rank in ranks for sample in rank["samples"])
        # A rank that was killed has not recorded its share.
        is_whole = len({rank["rank"] for rank in ranks}) == max(rank["rank"] for rank in ranks) + 1
        if not {*samples} <= {*wanted["samples"]} or (is_whole and len({*samples}) < len(samples)):
            compared.wrong.append(f"{where}: took the samples {samples}, expected {wanted['samples']}")
    missing = [step for step in range(1, STEPS + 1) if step not in seen]
    if missing:
        compared.wrong.append(f"steps that no start trained: {missing}")
    compared.wrong[20:] = []
    return compared


def _tensors(state: dict[str, Any], prefix: str = "") -> Any:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from _tensors(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value
