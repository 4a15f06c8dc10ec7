"""Save a loop of several processes whose model FSDP2 shards; resume it with any number of them.

Run `torchrun --nproc_per_node=2 own_fsdp_loop.py 200`, then `torchrun --nproc_per_node=2 own_fsdp_loop.py 300`: the
second call continues at step 201.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager, TrainState

steps = int(sys.argv[1])
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group(backend="nccl" if device == "cuda" else "gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
log.setup(rank)

torch.manual_seed(0)  # the same weights on every rank, before they are sharded
model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
fully_shard(model, mesh=init_device_mesh(device, (world_size,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
progress = TrainState()

with CheckpointManager.for_loop(
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    states={"train_state": progress},
    folder="outputs_fsdp/checkpoint",
    interval=100,
    async_mode="async_with_pinned_mem",
) as manager:
    manager.load()
    manager.reset()
    while progress.step < steps and not manager.preempted_by:
        # Each rank takes other data; it follows from the step alone, so there is no loader to save.
        generator = torch.Generator().manual_seed(progress.step * world_size + rank)
        x = torch.rand(64, 1, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x), torch.sin(6 * x))
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        if rank == 0 and progress.step % 50 == 0:
            print(f"step {progress.step}: loss {loss.item():.4f}")
        manager.save(progress.step, force=progress.step == steps)

dist.barrier()  # a rank that leaves early would abort the others
dist.destroy_process_group()
if manager.preempted_by:
    sys.exit(128 + manager.preempted_by)
