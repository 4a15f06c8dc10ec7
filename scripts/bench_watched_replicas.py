"""Measure what it costs that ranks watch their replicas (`digest_tensors` with "ranks").

    python scripts/bench_watched_replicas.py
    python scripts/bench_watched_replicas.py --gb 0.25 --rounds 3 --folder /mnt/disk

Two processes hold the same parameters, as under DDP. Each round saves them with and without, in turn, and times how
long each `save` blocks training, on the slower rank; and how long the bare digests of these bytes take. Prints the
medians of the rounds, what they add, and which part of ten steps of one second that is.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.checkpoint.planning.rank_comparison import _elements_digests

RANKS = 2
WIDTH = 2048
SAVES = 3
STEPS, STEP_SECONDS = 10, 1.0
"""Of the run whose part of the time is printed: a save each ten steps of a second."""


def main() -> int:
    """Run the command; return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="of parameters, on each rank (1)")
    parser.add_argument("--rounds", type=int, default=5, help="of each (5)")
    parser.add_argument("--mode", default="async", help="async_mode (async)")
    parser.add_argument("--folder", help="where the checkpoints are; default: the folder for temporary files")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        mp.start_processes(_run, (args.gb, args.rounds, args.mode, folder), nprocs=RANKS, start_method="spawn")
    return 0


def _run(rank: int, gb: float, rounds: int, mode: str, folder: str) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)  # As torchrun sets it.
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = max(1, round(gb * 1e9 / (4 * WIDTH * WIDTH)))
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
    blocked: dict[bool, list[float]] = {True: [], False: []}
    bare = []
    for number in range(rounds):
        for watches in random.Random(number).sample((True, False), 2):
            place = f"{folder}/{number}-{watches}"
            blocked[watches].append(_slowest(_blocked(model, place, mode, watches=watches)))
        dist.barrier()
        began = time.perf_counter()
        _elements_digests([parameter.detach() for parameter in model.parameters()])
        bare.append(_slowest(time.perf_counter() - began))
    if rank == 0:
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        added = statistics.median(a - b for a, b in zip(blocked[True], blocked[False], strict=True))
        print(f"{num_bytes / 1e9:.2f} GB on each of {RANKS} ranks, {mode}; seconds, medians of {rounds} rounds")
        print(f"a save blocks, with       {statistics.median(blocked[True]):8.3f}")
        print(f"a save blocks, without    {statistics.median(blocked[False]):8.3f}")
        print(f"added                     {added:8.3f}")
        print(f"the bare digests          {statistics.median(bare):8.3f}")
        print(f"of {STEPS} steps of {STEP_SECONDS:g} s         {added / (STEPS * STEP_SECONDS):8.2%}")
    dist.barrier()
    dist.destroy_process_group()


def _blocked(model: nn.Module, folder: str, mode: str, *, watches: bool) -> float:
    """Return the median of the seconds that `save` blocks; the first save, which plans, does not count."""
    seconds = []
    with CheckpointManager.for_loop(
        model=model,
        folder=folder,
        interval=1,
        async_mode=mode,
        digest_tensors=("ranks",) if watches else (),
        keep_latest_k=1,
        memory_ttl_seconds=0,  # Else what each round keeps in memory stays for minutes.
    ) as manager:
        manager.load()
        manager.reset()
        for step in range(1, SAVES + 2):
            dist.barrier()
            began = time.perf_counter()
            manager.save(step)
            manager.maybe_wait_for_staging()
            seconds.append(time.perf_counter() - began)
            manager.wait()
    for path in sorted(Path(folder).rglob("*.distcp")) if dist.get_rank() == 0 else []:
        path.unlink()
    return statistics.median(seconds[1:])


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


if __name__ == "__main__":
    raise SystemExit(main())
