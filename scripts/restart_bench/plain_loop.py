"""Train the same model with plain DCP, as its tutorial does: the contender "dcp" of scripts/bench_restart.py.

    torchrun ... plain_dcp.py CONFIG_JSON FOLDER INTERVAL STEPS BATCH SEQ_LEN

`dcp.save` every INTERVAL steps into a folder of its own, renamed when it is complete; a start loads the latest one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed import PrefixStore
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from restart_times import stamp

from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.model import Transformer


def main(sizes: str, folder: Path, interval: int, steps: int, batch_size: int, seq_len: int) -> None:
    """Train from the latest checkpoint in `folder`."""
    stamp("imported")
    rank = int(os.environ["RANK"])
    store, _, num_ranks = next(iter(rendezvous("env://")))
    # torchrun keeps its store when it restarts the workers. Without a prefix gloo of torch 2.13 tries the addresses
    # of the old workers, gives up, and the job does not restart at all.
    store = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    stamp("met")
    with torch.device("meta"):
        model = Transformer(ModelArgs(**json.loads(sizes), max_seq_len=seq_len))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.init_weights(0, buffer_device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    stamp("built")
    step = _load(model, optimizer, folder)
    stamp("loaded")
    while step < steps:
        step += 1
        generator = torch.Generator().manual_seed(step * 1000 + rank)
        tokens = torch.randint(model.args.vocab_size, (batch_size, seq_len + 1), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        stamp("trained", step)
        if step % interval == 0:
            _save(model, optimizer, folder, step)


def _load(model: Transformer, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    step = max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)
    if step:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return step


def _save(model: Transformer, optimizer: torch.optim.Optimizer, folder: Path, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    unfinished = folder / f"{step}.unfinished"
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(folder / str(step))
        for old in folder.iterdir():
            if old.name != str(step):
                shutil.rmtree(old)
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
