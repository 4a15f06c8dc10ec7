"""Save a Lightning Trainer's run with a callback: the model, the optimizers, the loops, the data.

Run `python lightning_callback.py 10`, then `python lightning_callback.py 20`: the second call continues at step 11.
"""

import signal
import sys

import lightning
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.config import Checkpoint, Job, JobConfig

TOTAL_STEPS = 20  # The data cover this many steps: the same number in every call, even if a call stops earlier.


class Checkpoints(lightning.Callback):
    """Load before the first step, call the manager after each step."""

    def __init__(self, config):
        self.config = config
        self.manager = None

    def on_fit_start(self, trainer, module):
        schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
        # Lightning's loops have the numbers of steps and epochs, and the position of a StatefulDataLoader.
        states = {"loops": trainer.fit_loop}
        self.manager = CheckpointManager(None, module, trainer.optimizers, schedulers, states, self.config)
        self.manager.load()
        self.handler = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer, module):
        signal.signal(signal.SIGTERM, self.handler)  # Lightning's would end the run before the ranks have saved.
        self.manager.reset()

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.manager.maybe_wait_for_staging()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        # With accumulate_grad_batches, return here unless this was the last batch of a step.
        self.manager.save(trainer.global_step, force=trainer.global_step == trainer.max_steps)
        if self.manager.preempted_by:
            trainer.should_stop = True

    def on_exception(self, trainer, module, exception):
        self.teardown(trainer, module, "fit")

    def teardown(self, trainer, module, stage):
        if self.manager is not None:
            self.manager.close()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        print(f"step {self.global_step + 1}: loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


log.setup()
steps = int(sys.argv[1])
lightning.seed_everything(0)
x = torch.rand(96, 1)
samples = torch.utils.data.TensorDataset(x, torch.sin(6 * x))
# When Lightning resumes from the last batch of an epoch, it skips the next one: put all epochs into one.
epochs = range(TOTAL_STEPS * 16 // len(samples) + 1)
order = torch.cat([torch.randperm(len(samples), generator=torch.Generator().manual_seed(each)) for each in epochs])
# With its own generator the loader does not draw from the one that dropout uses.
batches = StatefulDataLoader(samples, batch_size=16, sampler=order.tolist(), generator=torch.Generator())
config = JobConfig(
    job=Job(dump_folder="outputs_lightning"),
    checkpoint=Checkpoint(enable_checkpoint=True, interval=5, keep_latest_k=2),
)
checkpoints = Checkpoints(config)
trainer = lightning.Trainer(
    max_steps=steps,
    callbacks=[checkpoints],
    accelerator="cpu",
    devices=1,
    enable_checkpointing=False,  # Lightning's own.
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Regression(), batches)
if checkpoints.manager.preempted_by:
    sys.exit(128 + checkpoints.manager.preempted_by)
