"""Continue a run of transformers' Trainer: the Trainer stays, and a callback saves in place of it.

Run `python trainer_run.py before 5`, then `after 10` and `after 20`: the old folder is for the first of these.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from torchtitan_lite import log
from torchtitan_lite.integrations.transformers import Checkpoints

which, steps = sys.argv[1], int(sys.argv[2])


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= steps


class PrintingTrainer(Trainer):
    def compute_loss(self, *args, **keywords):
        loss = super().compute_loss(*args, **keywords)
        print(f"step {self.state.global_step + 1}: loss {loss.item():.9g}")
        return loss


log.setup()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False))
samples = [{"input_ids": each, "labels": each} for each in torch.randint(0, 64, (80, 32))]
arguments = TrainingArguments(
    output_dir="old_trainer",
    max_steps=20,
    per_device_train_batch_size=4,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    save_strategy="steps" if which == "before" else "no",
    save_steps=5,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
)
trainer = PrintingTrainer(model, arguments, train_dataset=samples, callbacks=[Stop()])
if which == "before":
    trainer.train()
else:
    Checkpoints("outputs_trainer/checkpoint", interval=5).train(
        trainer, resume_from_checkpoint="old_trainer/checkpoint-5"
    )
