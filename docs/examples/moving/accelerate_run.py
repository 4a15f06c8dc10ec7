"""Continue a run of accelerate: `load_state` is the line of the first start. Needs the task.py of docs/moving.md.

Run `python accelerate_run.py before 5`, then `after 10` and `after 20`.
"""

import sys

from accelerate import Accelerator
from task import model, optimizer, scheduler, train_one_step

from torchtitan_lite.checkpoint import TrainState
from torchtitan_lite.integrations.accelerate import for_accelerator

which, steps = sys.argv[1], int(sys.argv[2])
accelerator = Accelerator(cpu=True)
accelerator.prepare(model, optimizer, scheduler)
if which == "before":
    for step in range(1, steps + 1):
        train_one_step(step)
    accelerator.save_state(f"old_accelerate/{steps}")
    sys.exit()
progress = TrainState()
with for_accelerator(
    accelerator,
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    states={"train_state": progress},
    folder="outputs_accelerate/checkpoint",
    interval=5,
) as manager:
    if not manager.load():
        accelerator.load_state("old_accelerate/5")
        progress.step = 5
    manager.reset()
    while progress.step < steps and not manager.preempted_by:
        progress.step += 1
        train_one_step(progress.step)
        manager.save(progress.step, force=progress.step == steps)
if manager.preempted_by:
    sys.exit(128 + manager.preempted_by)
