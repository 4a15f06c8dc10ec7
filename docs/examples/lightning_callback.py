"""Save a Lightning Trainer's run with a callback: the model, the optimizers, the loops, the data.

Run `python lightning_callback.py 10`, then `python lightning_callback.py 20`: the second call continues at step 11.
"""

import sys

import lightning
import torch
from torch import nn

from torchtitan_lite import log
from torchtitan_lite.integrations.lightning import Checkpoints


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
lightning.seed_everything(0)
x = torch.rand(96, 1)
samples = torch.utils.data.TensorDataset(x, torch.sin(6 * x))
trainer = lightning.Trainer(
    max_steps=int(sys.argv[1]),
    callbacks=[Checkpoints("outputs_lightning/checkpoint", interval=5, keep_latest_k=2)],
    accelerator="cpu",
    devices=1,
    enable_checkpointing=False,  # Lightning's own.
    enable_progress_bar=False,
    logger=False,
)
trainer.fit(Regression(), torch.utils.data.DataLoader(samples, batch_size=16, shuffle=True))
