"""Special handling of FullyShardedDataParallel (FSDP1).

FSDP1's parameters are pieces of flat tensors, so its state dicts are copies, sharded as DTensors, and
only its own functions load them back; all of these are collective. They need a device mesh: without
one the state is made of ShardedTensors, which our plans do not support.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from torchtitan_lite.errors import ConfigError
from torchtitan_lite.torch_private import contiguities_of_fsdp1, mesh_of_fsdp1, open_contexts_of_fsdp1, sharded_by_fsdp1


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether FSDP1 wraps `module` or a part of it."""
    return any(isinstance(each, FullyShardedDataParallel) for each in module.modules())


@contextmanager
def sharded_state_dicts(module: nn.Module) -> Iterator[None]:
    """Make FSDP1's state dicts sharded within this context; do nothing for modules without FSDP1.

    If the body raises, the parameters are sharded again. Raises ConfigError for a hook that removes or renames a key.
    """
    if not is_fsdp1(module):
        yield
        return
    with warnings.catch_warnings():
        # Warnings that torch's own code causes.
        warnings.filterwarnings("ignore", message="FSDP.state_dict_type", category=FutureWarning)
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.", category=UserWarning)
        with sharded_by_fsdp1(module):
            try:
                yield
            except BaseException as error:
                _shard_again(module)
                _explain(error)
                raise


def refuse_trained_only(parts: Sequence[nn.Module]) -> None:
    """Raise ConfigError if a part is sharded by FSDP1: its flat parameters do not have the names of what is frozen."""
    if any(is_fsdp1(part) for part in parts):
        raise ConfigError(
            "checkpoint.save_trained_only: expected no FullyShardedDataParallel (FSDP1), whose flat parameters hide "
            "which of them are frozen. Shard with fully_shard (FSDP2), or leave save_trained_only out."
        )


def refuse_without_mesh(parts: Sequence[nn.Module]) -> None:
    """Raise ConfigError if FSDP1 shards a part without a device mesh."""
    for part in parts:
        for name, module in part.named_modules():
            if not isinstance(module, FullyShardedDataParallel):
                continue
            is_sharded = module.sharding_strategy is not ShardingStrategy.NO_SHARD
            if is_sharded and mesh_of_fsdp1(module) is None:
                raise ConfigError(
                    f"model: {name or 'the model'} is wrapped by FullyShardedDataParallel without a device mesh, and "
                    "its shards cannot be saved. Pass device_mesh=init_device_mesh(device_type, (world_size,)) to it, "
                    "or use fully_shard."
                )


def flat_names(module: nn.Module) -> dict[str, bool]:
    """Return the raw names of parameters that FSDP1 made flat, each with whether it was contiguous."""
    return {
        f"{prefix}.{name}" if prefix else name: is_contiguous
        for prefix, each in module.named_modules()
        if isinstance(each, FullyShardedDataParallel)
        for name, is_contiguous in contiguities_of_fsdp1(each)
    }


def _shard_again(module: nn.Module) -> None:
    """Exit the contexts in which torch unshards parameters for a state dict: it leaves them open if that raises.

    Seen in torch 2.11 to 2.13.
    """
    for each in reversed(list(module.modules())):
        open_contexts = open_contexts_of_fsdp1(each) if isinstance(each, FullyShardedDataParallel) else {}
        while open_contexts:
            open_contexts.popitem()[1].__exit__(None, None, None)


def _explain(error: BaseException) -> None:
    """Raise ConfigError in place of FSDP1's assertion that each parameter is in the state dict."""
    lost = re.match(r"FSDP assumes (\S+) is in the state_dict", str(error))
    if isinstance(error, AssertionError) and lost:
        raise ConfigError(
            f"model: {lost[1]} is not in the state dict under its name, because a state-dict hook took it out or "
            "renamed it, and FSDP1 gives no state dict then. Remove the hook, or use fully_shard."
        ) from error
