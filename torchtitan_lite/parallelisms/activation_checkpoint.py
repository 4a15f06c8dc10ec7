"""Activation checkpointing: recompute activations in backward instead of keeping them.

Blocks are wrapped, so module paths change, but the state dicts of DCP's `get_model_state_dict` do not. Results do not
change either: with dropout, the random state is restored for the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_lite.config.job_config import ActivationCheckpoint
from torchtitan_lite.torch_private import expensive_operators, recomputing

EXPENSIVE: set[Callable[..., Any]] = {torch.ops.aten.mm.default, *expensive_operators()}


def apply_activation_checkpointing(
    layers: nn.Module, config: ActivationCheckpoint, *, preserve_rng_state: bool
) -> None:
    """Wrap the children of `layers` that `config` selects, in place."""
    if config.mode == "none":
        return
    by_operator = config.mode == "selective" and config.selective_ac_option == "op"
    every = int(config.selective_ac_option) if config.mode == "selective" and not by_operator else 1
    settings: dict[str, Any] = {"preserve_rng_state": preserve_rng_state}
    if by_operator:
        settings["context_fn"] = keep_expensive_results
    for number, (name, block) in enumerate(list(layers.named_children()), start=1):
        if number % every == 0:
            layers.register_module(name, recomputing(block, **settings))


def keep_expensive_results() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return contexts of forward and recomputation that keep the results of attention and of every second matmul."""
    counts = {False: 0, True: 0}

    def policy(context: Any, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if operator in EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call, no-any-return]  # torch's gap
