"""Save peft's LoRA adapters from a loop of your own, without the frozen base.

Run `python peft_loop.py 10`, then `python peft_loop.py 20`: the second call continues at step 11.
With `save_trained_only` the checkpoint has the adapters and other trained parameters (`modules_to_save`) with their
optimizer state. A resume builds the same base and the same `LoraConfig`; a different base is not detected. The adapters
of the last step are also in `outputs_peft/export`, for `load_model` or `initial_load_path` with `save_trained_only`;
`torchtitan-lite export ... --format peft` writes them for `PeftModel.from_pretrained`.
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from torchtitan_lite import log
from torchtitan_lite.checkpoint import CheckpointManager, TrainState

log.setup()
steps = int(sys.argv[1])
torch.manual_seed(0)  # Every call needs the same base: from_pretrained(...), or this seed.
base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False))
model = get_peft_model(
    base, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
)
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
progress = TrainState()

with CheckpointManager.for_loop(
    model=model,
    optimizer=optimizer,
    lr_scheduler=scheduler,
    states={"train_state": progress},
    folder="outputs_peft/checkpoint",
    interval=5,
    keep_latest_k=2,
    async_mode="async",
    save_trained_only=True,  # without the frozen base
    export_folder="export",  # the adapters of the last step alone, in outputs_peft/export
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
model.save_pretrained("outputs_peft/adapter")  # peft's own format, to use the adapters without this package.
