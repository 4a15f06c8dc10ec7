"""Measure steps of a training next to an upload of a committed checkpoint, and without one.

    python scripts/bench_uploads.py OUT --mb-per-second 50 --rounds 5
    python scripts/bench_uploads.py OUT --mb-per-second 0 --rounds 5 --alone

OUT is a folder, or an address that the environment leads to. Each round trains for the same time with an upload under
way and without one, each in a process of its own, in turn. Prints the medians of the rounds, and of their ratios.
With --alone nothing is trained: prints the rate of an upload, and the time of a core that a GB takes.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITH, WITHOUT = "with an upload", "without"
WIDTH = 1024
DEADLINE_SECONDS = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the folder, or the address, that is uploaded to")
    parser.add_argument("--mb-per-second", type=float, default=50.0, help="the limit of the upload (50); 0: none")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each training (10)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (5)")
    parser.add_argument("--folder", type=Path, help="for the checkpoint (a temporary one)")
    parser.add_argument("--alone", action="store_true", help="measure uploads with no training next to them")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        job = json.loads(options.one)
        print(json.dumps(_upload(**job) if options.alone else [_train(**job)]))
        return 0
    found: dict[str, list[float]] = {WITH: [], WITHOUT: []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mb = round(1.5 * max(options.mb_per_second, 200.0 if not options.mb_per_second else 0.0) * options.seconds)
        job = {"folder": folder, "mb_per_second": options.mb_per_second, "seconds": options.seconds, "mb": mb}
        if options.alone:
            outs = [f"{options.out}/{number}" for number in range(options.rounds)]
            rates, cores = zip(*(_in_a_process({**job, "out": out}, "--alone") for out in outs), strict=True)
            print(f"{'an upload':16}{statistics.median(rates):8.0f} MB/s ({min(rates):.0f} to {max(rates):.0f})")
            print(f"{'a core':16}{statistics.median(cores):8.2f} s for each GB ({min(cores):.2f} to {max(cores):.2f})")
            return 0
        for number in range(options.rounds):
            for which in random.Random(number).sample((WITH, WITHOUT), 2):
                out = f"{options.out}/{number}" if which == WITH else ""
                found[which] += _in_a_process({**job, "out": out})
    for which, seconds in found.items():
        print(f"{which:16}{1000 * statistics.median(seconds):8.2f} ms a step")
    ratios = [a / b for a, b in zip(found[WITH], found[WITHOUT], strict=True)]
    print(f"{'ratio':16}{statistics.median(ratios):8.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0


def _in_a_process(job: dict[str, Any], *flags: str) -> list[float]:
    command = [sys.executable, __file__, "-", "--one", json.dumps(job), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_SECONDS)
    if done.returncode:
        sys.exit("a process failed; see above")
    figures: list[float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _train(folder: str, out: str, mb_per_second: float, seconds: float, mb: int) -> float:
    """Return the mean seconds of a step."""
    import torch

    from torchtitan_lite.events import ignore
    from torchtitan_lite.uploading.upload_process import UploadProcess
    from torchtitan_lite.uploading.uploader import UploadJob

    address = _stored(folder, mb)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(256, WIDTH)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):
        step()
    process = UploadProcess(UploadJob(address, out, max_bytes_per_second=mb_per_second * 1e6), ignore)
    if out:
        process.start()
        while not process.state.sent_bytes:
            time.sleep(0.01)
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        step()
        count += 1
    if out and process.is_idle:
        print("the upload was over before the training", file=sys.stderr)
    process.close()
    return passed / count


def _upload(folder: str, out: str, mb_per_second: float, seconds: float, mb: int) -> tuple[float, float]:
    """Return the MB/s of an upload, as its event has them, and the seconds of a core for each GB."""
    from torchtitan_lite.events import Event, Uploaded
    from torchtitan_lite.uploading.upload_process import UploadProcess
    from torchtitan_lite.uploading.uploader import UploadJob

    uploaded: list[Uploaded] = []

    def note(event: Event) -> None:
        if isinstance(event, Uploaded):
            uploaded.append(event)

    process = UploadProcess(UploadJob(_stored(folder, mb), out, max_bytes_per_second=mb_per_second * 1e6), note)
    process.start()
    process.wait(lambda: DEADLINE_SECONDS, DEADLINE_SECONDS)
    process.close()
    spent, (done,) = resource.getrusage(resource.RUSAGE_CHILDREN), uploaded
    return done.bytes / done.seconds / 1e6, (spent.ru_utime + spent.ru_stime) / (done.bytes / 1e9)


def _stored(folder: str, mb: int) -> str:
    """Return the folder with a checkpoint of `mb`, which is made unless it is there."""
    from torchtitan_lite.disk.block_writer import Bounced
    from torchtitan_lite.store import layout
    from torchtitan_lite.store.manifest import CheckpointKind, Manifest
    from torchtitan_lite.store.store import CheckpointStore

    store = CheckpointStore(Path(folder) / "checkpoint")
    if not store.committed():
        place, name = store.begin(1), layout.data_file(0, 0)
        record = store.new_file(place, name).write(Bounced(mb << 20, _fill))
        store.add_metadata(place, b"none")
        manifest = Manifest(
            step=1, kind=CheckpointKind.FULL, created_at=1.0, world_size=1, versions={}, files={name: record}
        )
        store.commit(1, manifest, place=place)
    return store.address


def _fill(buffer: memoryview, begin: int, end: int) -> None:
    buffer[: end - begin] = random.Random(begin).randbytes(end - begin)


if __name__ == "__main__":
    sys.exit(main())
