"""Save a run of transformers' Trainer: model, optimizer, schedule, generators, the Trainer's state, place in the data.

Run `python trainer_callback.py 10`, then `python trainer_callback.py 20`: the second call continues at step 11.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from torchtitan_lite import log
from torchtitan_lite.integrations.transformers import Checkpoints

TOTAL_STEPS = 20  # The schedule's length: the same in every call, even if a call stops earlier.


class TrainerWithLosses(Trainer):
    """Print every loss."""

    def compute_loss(self, *args, **keywords):
        loss = super().compute_loss(*args, **keywords)
        print(f"step {self.state.global_step + 1}: loss {loss.item():.9g}")
        return loss


class StopAt(TrainerCallback):
    """Stop early, as a job does whose time is over."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step >= int(sys.argv[1])


log.setup()
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False))
samples = [{"input_ids": each, "labels": each} for each in torch.randint(0, 64, (48, 32))]
arguments = TrainingArguments(
    output_dir="outputs_trainer",
    max_steps=TOTAL_STEPS,
    per_device_train_batch_size=4,
    lr_scheduler_type="cosine",
    save_strategy="no",  # The Trainer's own checkpoints.
    use_cpu=True,
    disable_tqdm=True,
    report_to=[],
)
trainer = TrainerWithLosses(model, arguments, train_dataset=samples, callbacks=[StopAt()])
Checkpoints("outputs_trainer/checkpoint", interval=5, keep_latest_k=2, async_mode="async").train(trainer)
