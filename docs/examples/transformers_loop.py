"""Save a transformers model and its schedule from a loop of your own.

Run `python transformers_loop.py 10`, then `python transformers_loop.py 20`: the second call continues at step 11.
A schedule depends on the total number of steps, which its `state_dict` does not contain: give the same at each start.
All twelve schedules of `get_scheduler` were tested.
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager, TrainState

TOTAL_STEPS = 20  # The schedule's length: the same in every call, even if a call stops earlier.

log.setup()
steps = int(sys.argv[1])
torch.manual_seed(0)
# Yours may come from GPT2LMHeadModel.from_pretrained(...): a load replaces its weights with the checkpoint's.
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False))
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=TOTAL_STEPS)
progress = TrainState()

with CheckpointManager.for_loop(
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    states={"train_state": progress},
    folder="outputs_transformers/checkpoint",
    interval=5,
    keep_latest_k=2,
    async_mode="async",
) as manager:
    manager.load()
    manager.reset()
    while progress.step < steps and not manager.preempted_by:
        # The data depend only on the step, so there is no loader to save.
        tokens = torch.randint(0, 64, (4, 32), generator=torch.Generator().manual_seed(progress.step))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        print(f"step {progress.step}: loss {loss.item():.9g}")
        manager.save(progress.step, force=progress.step == steps)

if manager.preempted_by:
    sys.exit(128 + manager.preempted_by)
