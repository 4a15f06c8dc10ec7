"""Save a run of transformers' Trainer with a callback: model, optimizer, schedule, steps, data.

Run `python trainer_callback.py 10`, then `python trainer_callback.py 20`: the second call continues at step 11.
"""

import sys
from contextlib import closing

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.config import Checkpoint, Job, JobConfig
from torchtitan_lite.data import StatefulDataLoaderAdapter

TOTAL_STEPS = 20  # The schedule's length: the same in every call, even if a call stops earlier.


class Progress:
    """The progress of the Trainer: the numbers of its `TrainerState` that a resume restores."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {"global_step": self.state.global_step, "num_input_tokens_seen": self.state.num_input_tokens_seen}

    def load_state_dict(self, state_dict):
        self.state.global_step = state_dict["global_step"]
        self.state.num_input_tokens_seen = state_dict["num_input_tokens_seen"]


class Checkpoints(TrainerCallback):
    """Load before the first step, call the manager after each step."""

    def __init__(self, config, batches):
        self.config = config
        self.batches = batches
        self.manager = None

    def on_train_begin(self, args, state, control, *, model, optimizer, lr_scheduler, **_):
        states = {"progress": Progress(state)}
        self.manager = CheckpointManager(self.batches, model, optimizer, lr_scheduler, states, self.config)
        self.manager.load()
        self.manager.reset()

    def on_pre_optimizer_step(self, args, state, control, **_):
        self.manager.maybe_wait_for_staging()

    def on_step_end(self, args, state, control, **_):
        if state.global_step >= steps:
            control.should_training_stop = True
        self.manager.save(state.global_step, force=control.should_training_stop)
        if self.manager.preempted_by:
            control.should_training_stop = True

    def close(self):
        """Close the manager: call it after training, even after an error, which callbacks do not see."""
        if self.manager is not None:
            self.manager.close()


class TrainerOfBatches(Trainer):
    """Use a given loader unchanged, so that it continues at its position, and print every loss."""

    def __init__(self, *args, batches, **keywords):
        super().__init__(*args, **keywords)
        self.batches = batches

    def get_train_dataloader(self):
        return self.batches

    def compute_loss(self, *args, **keywords):
        loss = super().compute_loss(*args, **keywords)
        print(f"step {self.state.global_step + 1}: loss {loss.item():.9g}")
        return loss


log.setup()
steps = int(sys.argv[1])
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False))
tokens = torch.randint(0, 64, (48, 32))
samples = [{"input_ids": each, "labels": each} for each in tokens]
# The Trainer counts its epochs from 0 at each start: put all epochs into one.
epochs = range(TOTAL_STEPS * 4 // len(samples) + 1)
order = torch.cat([torch.randperm(len(samples), generator=torch.Generator().manual_seed(each)) for each in epochs])
# With its own generator the loader does not draw from the one that dropout uses.
loader = StatefulDataLoader(
    samples, batch_size=4, sampler=order[: TOTAL_STEPS * 4].tolist(), generator=torch.Generator()
)
config = JobConfig(
    job=Job(dump_folder="outputs_trainer"),
    checkpoint=Checkpoint(enable_checkpoint=True, interval=5, keep_latest_k=2, async_mode="async"),
)
checkpoints = Checkpoints(config, StatefulDataLoaderAdapter(loader, rank=0, num_ranks=1))
trainer = TrainerOfBatches(
    model,
    TrainingArguments(
        output_dir="outputs_trainer",
        max_steps=TOTAL_STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        save_strategy="no",  # The Trainer's own checkpoints.
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    ),
    batches=loader,
    callbacks=[checkpoints],
)
with closing(checkpoints):
    trainer.train()
if checkpoints.manager.preempted_by:
    sys.exit(128 + checkpoints.manager.preempted_by)
