"""Every private or deprecated name of torch that this package uses.

torch may change these in any version, so each use of one is a function here, and scripts/structure/torch_names.py says
what is done where it is missing. A test finds any other use. Submodules of torch are imported only in the functions:
most processes need few of them.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.storage import TypedStorage, UntypedStorage

from torchtitan_lite.errors import ConfigError


@cache
def storage_info() -> Any:
    """Return the class with which DCP's metadata gives the place of an item: a path, an offset, a length."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each change of `tensor` in place."""
    return int(getattr(tensor, "_version", 0))


def versions_kept(tensors: Iterable[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context that hides from autograd that `tensors` are written: each is to have its values afterwards."""
    keep = getattr(torch.autograd, "_unsafe_preserve_version_counter", nullcontext)
    context: AbstractContextManager[Any] = keep(tuple(each for each in tensors if not each.is_inference()))
    return context


def is_set_by_torch(tensor: object, attribute: str) -> bool:
    """Return whether torch itself sets this attribute of a parameter: DDP's mixed precision and FSDP1 set tensors."""
    return attribute in ("_mp_param", "_fp_param") or hasattr(tensor, "_fqns")


@contextmanager
def without_step_hooks(optimizer: Any) -> Iterator[None]:
    """Within this context, have no hook run at a step of `optimizer`."""
    from torch.optim import optimizer as module

    owned = [
        *(getattr(optimizer, name, {}) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")),
        *(getattr(module, name, {}) for name in ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")),
    ]
    kept = [dict(hooks) for hooks in owned]
    for hooks in owned:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in zip(owned, kept, strict=True):
            hooks.update(before)


def lists_its_chunks(tensor: object) -> bool:
    """Return whether `tensor` itself reports to DCP which parts of the whole it holds."""
    return hasattr(tensor, "__create_chunk_list__")


def chunks_of(tensor: Any) -> Iterable[Any]:
    """Return the chunks, with offsets and sizes, that `tensor` reports to DCP."""
    chunks: Iterable[Any] = tensor.__create_chunk_list__()
    return chunks


def shard_at(tensor: Any, index: Any) -> torch.Tensor:
    """Return the memory of the chunk of `tensor` that DCP's `index` names."""
    memory: torch.Tensor = tensor.__get_tensor_shard__(index)
    return memory


def storage_kind(storage: object) -> Any:
    """Return the class by which a pickle names `storage`, a torch.FloatStorage or an UntypedStorage; None of others."""
    if isinstance(storage, TypedStorage):
        return getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]  # untyped in torch
    return UntypedStorage if isinstance(storage, UntypedStorage) else None


def loads_in_its_own_way(module: nn.Module) -> bool:
    """Return whether the class of `module` loads its own tensors with code of its own."""
    if isinstance(module, getattr(torch.jit, "ScriptModule", ())):
        return False
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def has_load_hooks(module: nn.Module) -> bool:
    """Return whether a hook runs before `module` itself loads its tensors."""
    if isinstance(module, getattr(torch.jit, "ScriptModule", ())):
        return False
    return bool(getattr(module, "_load_state_dict_pre_hooks", True))


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the buffers of `module` itself, those that are None included."""
    return dict(module._buffers)


def without_children(module: nn.Module, buffers: Mapping[str, torch.Tensor | None]) -> nn.Module:
    """Return a copy of `module` that has `buffers`, no parameters and no children."""
    alone = copy.copy(module)
    vars(alone).update(_buffers=dict(buffers), _parameters={}, _modules={})
    return alone


def version_of_module(state_dict: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return what a module's `state_dict` says about the version of the module at `path`."""
    version: dict[str, Any] = getattr(state_dict, "_metadata", {}).get(path, {})
    return version


def give_versions(state: Any, own: Any) -> None:
    """Give the state dicts within `state`, which was read, the versions of modules that those of `own` have."""
    if isinstance(state, Mapping) and isinstance(own, Mapping):
        if hasattr(own, "_metadata") and type(state) is OrderedDict:
            state._metadata = own._metadata  # type: ignore[attr-defined]  # torch's modules set it, too
        for key in state.keys() & own.keys():
            give_versions(state[key], own[key])


def load_alone(module: nn.Module, state_dict: dict[str, Any], prefix: str, version: dict[str, Any]) -> list[str]:
    """Have `module`, without its children, load the keys of `state_dict` under `prefix`. Return its errors."""
    errors: list[str] = []
    module._load_from_state_dict(state_dict, prefix, version, True, [], [], errors)
    return errors


def non_persistent_buffers(module: nn.Module) -> Iterable[str]:
    """Return the names of those buffers of `module` itself that its state dict leaves out."""
    names: Iterable[str] = getattr(module, "_non_persistent_buffers_set", ())
    return names


def iterator_of(loader: object) -> Any:
    """Return the iterator that a DataLoader keeps, or None."""
    return getattr(loader, "_iterator", None)


def workers_of(iterator: object) -> Sequence[Any]:
    """Return the worker processes of a DataLoader's iterator."""
    workers: Sequence[Any] = getattr(iterator, "_workers", ())
    return workers


def loader_iterators() -> list[Any]:
    """Return all iterators of DataLoaders in this process. Looks at every object, which takes up to 0.1 s."""
    from torch.utils.data import dataloader

    kinds = [dataloader._BaseDataLoaderIter]
    for kind in kinds:  # It grows meanwhile.
        kinds += kind.__subclasses__()
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]


def seeds_of(iterator: object) -> set[int]:
    """Return the seeds that a DataLoader's iterator drew, and its RandomSampler."""
    seeds = {getattr(iterator, "_base_seed", None)}
    order = getattr(iterator, "_sampler_iter", None)
    while (frame := getattr(order, "gi_frame", None)) is not None:  # A batch sampler has the iterator of a sampler.
        seeds.add(frame.f_locals.get("seed"))
        order = frame.f_locals.get("sampler_iter")
    return {seed for seed in seeds if isinstance(seed, int)}


def num_yielded(iterator: object) -> int:
    """Return how many batches a DataLoader's iterator has yielded."""
    return int(getattr(iterator, "_num_yielded", 0))


def inner_schedulers(scheduler: object) -> Sequence[Any] | None:
    """Return the schedulers of which `scheduler` is made, as SequentialLR and ChainedScheduler are; None if of none."""
    inner = getattr(scheduler, "_schedulers", None)
    return inner if isinstance(inner, list | tuple) else None


def set_last_lr(scheduler: Any, rates: list[float | torch.Tensor]) -> None:
    """Have `get_last_lr` of `scheduler` return `rates`."""
    scheduler._last_lr = rates


def is_compiled(module: object) -> bool:
    """Return whether `module` is what torch.compile returned for a module."""
    # Who compiled one has loaded the compiler, and to load it takes a second.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


COMPILED = "_orig_mod"
"""The attribute of a compiled module that is the module itself."""
WRAPPED_BY_FSDP1 = "_fsdp_wrapped_module"
WRAPPED_FOR_RECOMPUTING = "_checkpoint_wrapped_module."
"""What `recomputing` adds to the names of parameters."""


def load_compiler() -> None:
    """Import torch's compiler, which the first optimizer imports otherwise."""
    import_module("torch._dynamo")


def recomputing(module: nn.Module, **settings: Any) -> nn.Module:
    """Return `module` in a wrapper that recomputes its activations in backward."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped: nn.Module = checkpoint_wrapper(module, **settings)
    return wrapped


def expensive_operators() -> set[Any]:
    """Return the operators of attention and of reduce-scatter, of all backends that this torch has."""
    attention = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
    found = [getattr(torch.ops.aten, f"_scaled_dot_product_{name}", None) for name in attention]
    collectives = getattr(torch.ops, "_c10d_functional", None)
    found.append(getattr(collectives, "reduce_scatter_tensor", None))
    return {operator.default for operator in found if operator is not None}


@contextmanager
def sharded_by_fsdp1(module: nn.Module) -> Iterator[None]:
    """Make the state dicts of FSDP1 in `module` sharded within this context."""
    from torch.distributed.fsdp import (
        FullyShardedDataParallel,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        StateDictType,
    )

    kind = StateDictType.SHARDED_STATE_DICT
    with FullyShardedDataParallel.state_dict_type(
        module, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    ):
        yield


def mesh_of_fsdp1(module: object) -> Any:
    """Return the device mesh that a FullyShardedDataParallel was given, or None."""
    return getattr(module, "_device_mesh", None)


def contiguities_of_fsdp1(module: object) -> Iterator[tuple[str, bool]]:
    """Yield the name of each parameter that FullyShardedDataParallel has made flat, and whether it is contiguous."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)
    yield from zip(getattr(flat, "_fqns", ()), getattr(flat, "_contiguities", ()), strict=False)


def open_contexts_of_fsdp1(module: object) -> dict[Any, Any]:
    """Return the contexts in which a FullyShardedDataParallel has unsharded parameters, to be emptied."""
    contexts: dict[Any, Any] = getattr(module, "_unshard_params_ctx", {})
    return contexts


def holds_unsharded_gradients(module: object) -> bool:
    """Return whether a module of `fully_shard` holds gradients that it has not reduced yet."""
    state = getattr(module, "_get_fsdp_state", lambda: None)()
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for parameter in getattr(group, "fsdp_params", ()):
            unsharded = getattr(parameter, "_unsharded_param", None)
            if getattr(parameter, "unsharded_accumulated_grad", None) is not None:
                return True
            if unsharded is not None and unsharded.grad is not None:
                return True
    return False


def set_timeout(group: dist.ProcessGroup | None, timeout: timedelta) -> None:
    """Set the time-out of the collectives of `group`, by default of the default group."""
    if hasattr(dist, "set_timeout"):
        dist.set_timeout(timeout, group)
        return
    from torch.distributed.distributed_c10d import _set_pg_timeout

    _set_pg_timeout(timeout, group)


def collectives_begun(group: dist.ProcessGroup) -> int | None:
    """Return how many collectives this rank has begun in `group`; None if torch does not count them. Any thread."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    return None if count is None else int(count())


def register_fake_backend() -> None:
    """Register the backend "fake", a process group that carries no data. Raise ConfigError if torch has none."""
    try:
        import_module("torch.testing._internal.distributed.fake_pg")
    except ImportError as error:
        raise ConfigError(f"comm.simulated_ranks: torch {torch.__version__} has no fake process group.") from error


def record_memory_history(*, max_events: int) -> None:
    """Have the CUDA allocator keep its last `max_events` allocations and frees; 0 stops it."""
    if max_events:
        torch.cuda.memory._record_memory_history(max_entries=max_events)
    else:
        torch.cuda.memory._record_memory_history(enabled=None)


def memory_snapshot() -> Any:
    """Return what the CUDA allocator has recorded."""
    return torch.cuda.memory._snapshot()
