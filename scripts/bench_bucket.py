"""Measure saves and loads in an object store next to a disk, and next to the store's client alone.

    python scripts/bench_bucket.py s3://bucket/bench --mb 512 --rounds 7

Each round runs a small loop with asynchronous saves by a writer process into a folder on the disk and into the store,
and its bytes up and down through the client alone, each in a process of its own, in turn. Prints medians of the rounds
and the medians of the rounds' ratios. The environment says how to reach the store: docs/where_a_step_can_be.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PART_BYTES = 8 << 20
AT_A_TIME = 5
SAVES = 4
PAUSE_SECONDS = 1.0
"""Between two saves, as steps of a training are: what one leaves to do in the background is over before the next."""
FIGURES = {
    "blocked_seconds": "training is blocked by a save",
    "durable_seconds": "a save, until it is durable",
    "load_seconds": "a load",
    "trainer_bytes": "memory of the trainer beyond state and copy",
    "writer_bytes": "memory of the writer process",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="a folder in the store, s3://bucket/bench")
    parser.add_argument("--mb", type=int, default=512, help="size of the model (512)")
    parser.add_argument("--rounds", type=int, default=7, help="of each (7)")
    parser.add_argument("--folder", type=Path, help="on the disk to compare with (a temporary one)")
    parser.add_argument("--one", choices=("loop", "client"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        measure = _loop if options.one == "loop" else _client
        print(json.dumps(measure(options.address, options.mb << 20)))
        return 0
    rounds: dict[str, list[dict[str, float]]] = {"disk": [], "store": [], "client": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds):
            rounds["disk"].append(_in_a_process("loop", f"{folder}/{number}", options.mb))
            rounds["store"].append(_in_a_process("loop", f"{options.address}/{number}", options.mb))
            rounds["client"].append(_in_a_process("client", f"{options.address}/client-{number}", options.mb))
    _print(rounds)
    return 0


def _in_a_process(kind: str, address: str, mb: int) -> dict[str, float]:
    command = [sys.executable, __file__, address, "--one", kind, "--mb", str(mb)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _print(rounds: dict[str, list[dict[str, float]]]) -> None:
    for figure, meaning in FIGURES.items():
        medians = {
            where: statistics.median(each[figure] for each in found)
            for where, found in rounds.items()
            if figure in found[0]
        }
        shown = ", ".join(f"{where} {_of(figure, value)}" for where, value in medians.items())
        ratios = [
            f"store / {other} {_ratio(rounds['store'], found, figure):.2f}"
            for other, found in rounds.items()
            if other != "store" and figure in found[0] and not figure.endswith("_bytes")
        ]
        print(f"{meaning}: {shown}" + "".join(f"; {ratio}" for ratio in ratios))


def _ratio(found: list[dict[str, float]], others: list[dict[str, float]], figure: str) -> float:
    return statistics.median(a[figure] / b[figure] for a, b in zip(found, others, strict=True))


def _of(figure: str, value: float) -> str:
    return f"{value / 2**20:.0f} MiB" if figure.endswith("_bytes") else f"{value:.3f} s"


def _loop(folder: str, num_bytes: int) -> dict[str, float]:
    """Save a model of `num_bytes` a few times and load it; return medians without the first save."""
    import torch

    from torchtitan_lite.checkpoint import CheckpointManager

    torch.set_num_threads(1)
    count = max(1, num_bytes >> 24)
    model = torch.nn.ParameterList([torch.randn(num_bytes // count // 4) for _ in range(count)])
    durable: list[float] = []

    def note(event: str, step: int, /, **figures: Any) -> None:
        if event == "committed":
            durable.append(figures["seconds"])

    settings: dict[str, Any] = {"async_mode": "async_with_pinned_mem", "interval": 1, "keep_latest_k": 1}
    blocked = []
    with CheckpointManager.for_loop(model=model, folder=folder, on_event=note, **settings) as manager:
        manager.load()
        manager.reset()
        before, most = _private_bytes("self"), 0
        for step in range(1, SAVES + 1):
            began = time.monotonic()
            manager.save(step)
            manager.maybe_wait_for_staging()
            blocked.append(time.monotonic() - began)
            manager.wait()
            time.sleep(PAUSE_SECONDS)
            most = max(most, _private_bytes("self"))
        pid = manager._saver.process.pid  # type: ignore[attr-defined]  # of this mode
        writer = _private_bytes(str(pid))
    again = torch.nn.ParameterList([torch.zeros_like(each) for each in model])
    with CheckpointManager.for_loop(model=again, folder=folder, load_only=True) as manager:
        began = time.monotonic()
        manager.load()
        seconds = time.monotonic() - began
    assert torch.equal(again[0], model[0])
    return {
        "blocked_seconds": statistics.median(blocked[1:]),
        "durable_seconds": statistics.median(durable[1:]),
        "load_seconds": seconds,
        "trainer_bytes": max(0, most - before),
        "writer_bytes": writer,
    }


def _private_bytes(pid: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _client(address: str, num_bytes: int) -> dict[str, float]:
    """Send and fetch `num_bytes` by the client alone, in parts as a save does."""
    import numpy
    import obstore

    from torchtitan_lite.bucket.objects import connect
    from torchtitan_lite.config.address import parse_address

    objects: Any = connect(parse_address(address))
    data = memoryview(numpy.random.default_rng(0).bytes(num_bytes))  # type: ignore[arg-type]  # bytes are a buffer
    begins = range(0, num_bytes, PART_BYTES)
    seconds = []
    for number in range(SAVES):
        parts = (data[begin : begin + PART_BYTES] for begin in begins)
        began = time.monotonic()
        several = {"use_multipart": True, "chunk_size": PART_BYTES, "max_concurrency": AT_A_TIME}
        obstore.put(objects._bulk, f"object-{number}", itertools.chain(parts), **several)
        seconds.append(time.monotonic() - began)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as threads:
        ends = [(begin, min(begin + PART_BYTES, num_bytes)) for begin in begins]
        found = sum(
            threads.map(
                lambda span: len(obstore.get_range(objects._bulk, "object-0", start=span[0], end=span[1])), ends
            )
        )
    assert found == num_bytes
    load_seconds = time.monotonic() - began
    objects.delete([f"object-{number}" for number in range(SAVES)])
    return {"durable_seconds": statistics.median(seconds[1:]), "load_seconds": load_seconds}


if __name__ == "__main__":
    sys.exit(main())
