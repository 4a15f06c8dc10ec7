"""A run of transformers' Trainer with a small GPT-2, for tests: it prints each loss, and may end itself."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import EarlyStoppingCallback

from tests.processes import kill_with_children
from torchtitan_lite import log
from torchtitan_lite.integrations.transformers import Checkpoints


class Printing(Trainer):
    """Prints the loss of each batch."""

    def compute_loss(self, *args: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(*args, **keywords)
        if self.model.training:
            line = f"{self.args.process_index} step {self.state.global_step + 1}: loss {loss.item():.9g}\n"
            os.write(1, line.encode())  # In one piece: the other rank writes into the same file.
        return loss


class Signal(TrainerCallback):
    """Sends `number` to this process in `step`, in the hook `name`."""

    def __init__(self, step: int, number: int, name: str) -> None:
        self.step, self.number, self.name = step, number, name
        setattr(self, name, self._send)

    def _send(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        done = self.step if self.name == "on_step_end" else self.step - 1
        if state.global_step == done:
            if self.number == signal.SIGKILL and args.dataloader_num_workers:
                kill_with_children()
            os.kill(os.getpid(), self.number)


def run(
    folder: str,
    kill_at: int = 0,
    kill_in: str = "on_step_end",
    signal_at: int = 0,
    num_samples: int = 22,
    arguments: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    patience: int = 0,
    lora: bool = False,
) -> None:
    log.setup(int(os.environ.get("RANK", "0")))
    torch.manual_seed(0)
    small = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False)
    tokens = torch.randint(0, 64, (num_samples, 16))
    samples = [{"input_ids": each, "labels": each} for each in tokens]
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/trainer",
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
    }
    settings |= arguments or {}
    model: Any = GPT2LMHeadModel(small)
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
    trainer = Printing(
        model,
        TrainingArguments(**settings),
        train_dataset=samples,
        eval_dataset=samples[:4],
        callbacks=[EarlyStoppingCallback(patience)] if patience else [],
    )
    if kill_at:
        trainer.add_callback(Signal(kill_at, signal.SIGKILL, kill_in))
    if signal_at:
        trainer.add_callback(Signal(signal_at, signal.SIGTERM, "on_step_end"))
    # As a user who draws random numbers between the two.
    torch.rand(3)
    result = Checkpoints(f"{folder}/checkpoint", **{"interval": 3, "keep_latest_k": 0} | (keys or {})).train(trainer)
    values = [parameter.double().sum().item() for parameter in trainer.model.parameters()]
    logs = [entry.get("eval_loss", entry.get("loss")) for entry in trainer.state.log_history[:-1]]
    ended = {
        "step": result.global_step,
        "values": values,
        "epoch": trainer.state.epoch,
        "logs": logs,
        "model": type(trainer.model_wrapped).__name__,
    }
    os.write(1, f"ended {json.dumps(ended)}\n".encode())
