"""Train the same model with torchft: the contender "torchft" of scripts/bench_restart.py.

    python torchft_loop.py MAX_RESTARTS CONFIG_JSON STEPS BATCH SEQ_LEN

starts a lighthouse and two replica groups, each a torchrun with one rank. Each group has the whole model; a group that
is started again gets it from the other one, which trains meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from restart_times import stamp

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer

GROUPS = 2
RANK = "BENCH_RESTART_RANK"


def launch(max_restarts: str, *model: str) -> int:
    """Run the groups until one of them has ended; end the others."""
    from torchft.coordination import LighthouseServer

    house = LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=60_000, quorum_tick_ms=50, heartbeat_timeout_ms=1000)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    torchrun += ["--nproc-per-node=1", f"--max-restarts={max_restarts}", "--monitor-interval=0.1", __file__, *model]
    groups = []
    for group in range(GROUPS):
        environment = os.environ | {"TORCHFT_LIGHTHOUSE": house.address(), RANK: str(group)}
        groups.append(subprocess.Popen(torchrun, env=environment))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        os.wait()
    finally:
        for each in groups:
            each.terminate()
    return 1


def train(sizes: str, steps: int, batch_size: int, seq_len: int) -> None:
    """Train as one replica group."""
    from torchft import Manager, ProcessGroupGloo

    stamp("imported")
    group = int(os.environ[RANK])
    torch.manual_seed(0)
    model = Transformer(ModelArgs(**json.loads(sizes), max_seq_len=seq_len))
    model.init_weights(0, buffer_device=torch.device("cpu"))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()},
        min_replica_size=1,
        replica_id=f"group-{group}",
        hostname="localhost",
        timeout=timedelta(seconds=5),
    )
    stamp("met")
    stamp("built")
    stamp("loaded")  # With the first step, if another group has a later state.
    while manager.current_step() < steps:
        generator = torch.Generator().manual_seed(manager.current_step() * 1000 + group)
        tokens = torch.randint(model.args.vocab_size, (batch_size, seq_len + 1), generator=generator)
        manager.start_quorum()
        adamw.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        # Not its DistributedDataParallel, whose hook (0.2.0) raises in the group that is left over, with torch 2.13.
        for work in [manager.allreduce(each.grad) for each in model.parameters() if each.grad is not None]:
            work.wait()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if manager.should_commit():  # Not while the groups heal.
            adamw.step()
            stamp("trained", manager.current_step())


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], *map(int, sys.argv[2:]))
    else:
        sys.exit(launch(*sys.argv[1:]))
