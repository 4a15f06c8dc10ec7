"""Measure how long ranks of one host take to load, and how much they read, in one or two versions of this project.

    python scripts/bench_rank_loads.py --rounds 5 --alone --hosts
    python scripts/bench_rank_loads.py --rounds 5 --against ../older-checkout

The ranks load a model whose parameters all of them hold (`ddp`), which all share (`fsdp`), or which each half of them
shares (`hsdp`). Before each load the page cache has nothing of the files. A load takes as long as its slowest rank, and
reads what all of them had the disk read. With `--hosts` two of four ranks take the others for ranks of another host,
and pass on what they read through the process group, here over the loopback device. A figure is the median of the
rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = ("ddp", "fsdp", "hsdp")
DEADLINE_SECONDS = 300
"""Of the ranks of one load."""


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mb", type=int, default=1024, help="size of the model (default: 1024)")
    parser.add_argument("--ranks", type=int, default=4, help="an even number (default: 4)")
    parser.add_argument("--hosts", action="store_true", help="also as if the ranks were on two hosts")
    parser.add_argument("--alone", action="store_true", help="also with each rank by itself (full_alone)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--against", type=Path, help="another checkout, which is measured in the same rounds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _rank(**json.loads(args.child))
        return 0
    ways: dict[str, tuple[Path, dict[str, Any]]] = {"this": (ROOT, {})}
    ways |= {"hosts": (ROOT, {"hosts": 2})} if args.hosts else {}
    ways |= {"alone": (ROOT, {"alone": True})} if args.alone else {}
    ways |= {"other": (args.against.resolve(), {})} if args.against else {}
    cells = [(layout, name) for layout in args.layouts for name in ways]
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=args.folder.absolute()) as folder:
        _in_ranks(ROOT, {"folder": folder, "mb": args.mb, "layout": "save"}, 1)
        for number in range(args.rounds):
            for layout, name in random.Random(number).sample(cells, len(cells)):
                _make_cold(Path(folder, "checkpoint"))
                root, way = ways[name]
                ranks = _in_ranks(root, {"folder": folder, "mb": args.mb, "layout": layout} | way, args.ranks)
                read = sum(rank["bytes"] for rank in ranks) / (args.mb << 20)
                found[layout, name].append((max(rank["seconds"] for rank in ranks), read))
    for layout, name in cells:
        seconds, read = zip(*found[layout, name], strict=True)
        print(f"{layout:5} {name:6} {_figure(seconds)} s   read / size {_figure(read)}")
    return 0


def _figure(values: tuple[float, ...]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _make_cold(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _in_ranks(root: Path, job: dict[str, Any], num_ranks: int) -> list[dict[str, float]]:
    """Run `job` in `num_ranks` processes with the package of `root`; return what each found."""
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "TORCHTITAN_LITE_MEMORY": "off"}
    with tempfile.TemporaryDirectory(dir=job["folder"]) as meeting:
        ranks = []
        for rank in range(num_ranks):
            given = json.dumps(job | {"rank": rank, "num_ranks": num_ranks, "meeting": meeting})
            command = [sys.executable, __file__, "--child", given]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        try:
            answers = [rank.communicate(timeout=DEADLINE_SECONDS)[0] for rank in ranks]
        finally:
            for each in ranks:
                each.kill()
    if any(rank.returncode for rank in ranks):
        sys.exit("a rank failed; see above")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def _rank(
    rank: int,
    num_ranks: int,
    meeting: str,
    folder: str,
    mb: int,
    layout: str,
    hosts: int = 1,
    alone: bool = False,
) -> None:
    """Save, or load, on one rank; print how long a load took and what it had the disk read."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from torchtitan_lite.checkpoint import CheckpointManager
    from torchtitan_lite.checkpoint.reading import shared_reads

    torch.set_num_threads(1)
    if hosts > 1:
        shared_reads.host_id = lambda: f"host {rank * hosts // num_ranks}"
    dist.init_process_group("gloo", init_method=f"file://{meeting}/rendezvous", rank=rank, world_size=num_ranks)
    width = 2048
    model = torch.nn.Sequential(
        *(torch.nn.Linear(width, width, bias=False) for _ in range((mb << 20) // (4 * width**2)))
    )
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    if layout == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("replicate", "shard")))
    loads = layout != "save"
    options: dict[str, Any] = {"load_only": loads, "verify_on_load": "full_alone" if alone else "full"}
    with CheckpointManager.for_loop(model=model, folder=Path(folder, "checkpoint"), **options) as manager:
        dist.barrier()
        before, began = _bytes_read(), time.monotonic()
        manager.load()
        seconds, read = time.monotonic() - began, _bytes_read() - before
        if not loads:
            manager.save(1, now=True)
        dist.barrier()
    print(json.dumps({"seconds": seconds, "bytes": read}))
    dist.barrier()
    dist.destroy_process_group()


def _bytes_read() -> int:
    """Return how many bytes this process has had the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


if __name__ == "__main__":
    sys.exit(main())
