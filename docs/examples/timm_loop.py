"""Save a timm model, its optimizer and its schedule from a loop of your own.

Run `python timm_loop.py 10`, then `python timm_loop.py 20`: the second call continues at step 11.
timm's schedules have no `step()` without a number, so this calls `step_update` with the number of steps done. 86 of its
optimizers were tested; Adahessian draws from a generator that its `state_dict` lacks, and does not resume exactly.
"""

import sys

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import nn

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager, TrainState

TOTAL_STEPS = 20  # The schedule's length: the same in every call, even if a call stops earlier.

log.setup()
steps = int(sys.argv[1])
torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=10, drop_rate=0.1)
model.train()
optimizer = create_optimizer_v2(model, opt="lamb", lr=1e-2, weight_decay=0.05)
scheduler = CosineLRScheduler(
    optimizer, t_initial=TOTAL_STEPS, warmup_t=4, warmup_lr_init=1e-4, t_in_epochs=False, noise_range_t=(5, 20)
)
progress = TrainState()

with CheckpointManager.for_loop(
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    states={"train_state": progress},
    folder="outputs_timm/checkpoint",
    interval=5,
    keep_latest_k=2,
    async_mode="async",
) as manager:
    manager.load()
    manager.reset()
    while progress.step < steps and not manager.preempted_by:
        # The data depend only on the step, so there is no loader to save.
        generator = torch.Generator().manual_seed(progress.step)
        images, labels = torch.randn(4, 3, 64, 64, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        scheduler.step_update(progress.step)
        print(f"step {progress.step}: loss {loss.item():.9g}")
        manager.save(progress.step, force=progress.step == steps)

if manager.preempted_by:
    sys.exit(128 + manager.preempted_by)
