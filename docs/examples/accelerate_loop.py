"""Save a loop with accelerate: the prepared model, optimizer and schedule, the position in the data, the step.

Run `python accelerate_loop.py 10`, then `python accelerate_loop.py 20`: the second call continues at step 11.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn

from torchtitan_lite import log
from torchtitan_lite.checkpoint import TrainState
from torchtitan_lite.integrations.accelerate import Batches, for_accelerator

log.setup()
steps = int(sys.argv[1])
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
x = torch.rand(96, 1)
samples = torch.utils.data.TensorDataset(x, torch.sin(6 * x))
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))
adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)
model, optimizer, scheduler, loader = accelerator.prepare(
    net,
    adamw,
    torch.optim.lr_scheduler.ExponentialLR(adamw, gamma=0.99),
    torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True),
)
progress, batches = TrainState(), Batches(loader)

with for_accelerator(
    accelerator,
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    dataloader=batches,
    states={"train_state": progress},
    folder="outputs_accelerate/checkpoint",
    interval=5,
    keep_latest_k=2,
) as manager:
    manager.load()
    manager.reset()
    while progress.step < steps and not manager.preempted_by:
        for inputs, targets in batches:  # The rest of the epoch, after a load too.
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            manager.maybe_wait_for_staging()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step += 1
            print(f"step {progress.step}: loss {loss.item():.9g}")
            manager.save(progress.step, force=progress.step == steps)
            if progress.step == steps or manager.preempted_by:
                break

if manager.preempted_by:
    sys.exit(128 + manager.preempted_by)
