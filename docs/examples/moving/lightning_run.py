"""Continue a run of Lightning: the Trainer stays, and a callback saves in place of ModelCheckpoint.

Run `python lightning_run.py before 5`, then `after 10` and `after 20`: the file of Lightning is for the first of these.
"""

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager


class Checkpoints(lightning.Callback):
    def on_fit_start(self, trainer, module):
        self.manager = CheckpointManager.for_loop(
            model=module,
            optimizer=trainer.optimizers,
            lr_scheduler=[each.scheduler for each in trainer.lr_scheduler_configs],
            states={"loops": trainer.fit_loop},
            folder="outputs_lightning/checkpoint",
            interval=5,
        )
        self.manager.load()

    def on_train_start(self, trainer, module):
        self.manager.reset()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.manager.save(trainer.global_step, force=trainer.global_step == trainer.max_steps)

    def teardown(self, trainer, module, stage):
        self.manager.close()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x), y)
        print(f"step {self.global_step + 1}: loss {loss.item():.9g}")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


log.setup()
which, steps = sys.argv[1], int(sys.argv[2])
lightning.seed_everything(0)
x = torch.rand(320, 1)
samples = torch.utils.data.TensorDataset(x, torch.sin(6 * x))
batches = StatefulDataLoader(samples, batch_size=16, generator=torch.Generator())
options = {"accelerator": "cpu", "devices": 1, "max_steps": steps, "logger": False, "enable_progress_bar": False}
if which == "before":
    saving = ModelCheckpoint(dirpath="old_lightning", filename="last", every_n_train_steps=5)
    lightning.Trainer(**options, callbacks=[saving]).fit(Regression(), batches)
else:
    is_first = not any(Path("outputs_lightning/checkpoint").glob("step-*"))
    trainer = lightning.Trainer(**options, callbacks=[Checkpoints()], enable_checkpointing=False)
    trainer.fit(Regression(), batches, ckpt_path="old_lightning/last.ckpt" if is_first else None)
    trainer.save_checkpoint("back.ckpt")  # The way back: not needed otherwise.
