"""A registry of torchtitan with one small Llama 3."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.validate import Validator
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def small() -> Any:
    config = llama3_debugmodel()
    training = dataclasses.replace(config.training, local_batch_size=2, seq_len=64)
    checkpoint = CheckpointManager.Config(interval=2, last_save_model_only=False)
    return dataclasses.replace(
        config, validator=Validator.Config(enable=False), training=training, checkpoint=checkpoint
    )
