"""Other libraries, if installed, each called as its own documentation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpoint_bench import disk
from checkpoint_bench.contenders import Contender, Pending, is_installed, join_group_of_one
from checkpoint_bench.states import BenchState

INSTALL = {
    "torchtitan": "torchtitan==0.3.0",
    "torch_checkpointing": "torch-checkpointing==0.1.1",
    "torchsnapshot": "torchsnapshot==0.1.0",
    "bytecheckpoint": "bytecheckpoint==0.0.2 --no-deps, and then: mmh3 universal-pathlib cachetools safetensors",
}
"""Module to the argument of pip install."""


class Torchtitan:
    """torchtitan's CheckpointManager, async_mode "disabled"."""

    name, who_syncs = "torchtitan", "itself: files and .metadata, no folder"
    async_mode = "disabled"

    def __init__(self) -> None:
        self._managers: dict[int, tuple[BenchState, Any]] = {}

    def save(self, state: BenchState, folder: Path) -> None:
        self.manager_for(state, folder).save(1)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        self.manager_for(target, folder).load(1)

    def close(self) -> None:
        for _, manager in self._managers.values():
            manager.close()

    def manager_for(self, state: BenchState, folder: Path) -> Any:
        """Return the manager of `state` with its folder set to `folder`; always the same one."""
        if id(state) not in self._managers:
            self._managers[id(state)] = (state, self._manager_of(state))
        manager = self._managers[id(state)][1]
        manager.folder = str(folder)
        return manager

    def _manager_of(self, state: BenchState) -> Any:
        from torchtitan.components.checkpoint import CheckpointManager

        join_group_of_one()
        return CheckpointManager(
            CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0, async_mode=self.async_mode),
            dataloader=None,
            model_parts=[_Holder(state.model)],
            optimizers=_Flat(state.optimizer),
            lr_schedulers=_Flat({}),
            states={"train_state": _Flat(state.counters)},
            sd_adapter=None,
        )


class TorchtitanAsync(Torchtitan):
    """torchtitan's CheckpointManager, async_mode "async"."""

    name, async_mode = "torchtitan async", "async"

    def prepare(self, state: BenchState) -> None:
        self.manager_for(state, Path())

    def save(self, state: BenchState, folder: Path) -> Pending:  # type: ignore[override]  # in the background
        manager = self.manager_for(state, folder)
        manager.save(1)
        return Pending(manager.maybe_wait_for_staging, manager.save_future)

    def settle(self) -> None: ...


class TorchCheckpointing:
    """torch_checkpointing's CheckpointManager, with a synchronous save."""

    name, who_syncs = "torch_checkpointing", "the bench: files"

    def __init__(self) -> None:
        from torch_checkpointing.config import SyncCheckpointSaverConfig

        self._manager = _torch_checkpointing(SyncCheckpointSaverConfig())

    def save(self, state: BenchState, folder: Path) -> None:
        self._manager.save(str(folder), state.nested())
        disk.sync_files(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        loaded = self._manager.load(str(folder), into=target.nested())
        for key, tensors in (("model", target.model), ("optimizer", target.optimizer)):
            for name, tensor in tensors.items():
                if loaded[key][name] is not tensor:
                    tensor.copy_(loaded[key][name])

    def close(self) -> None:
        self._manager.close()


class TorchCheckpointingAsync:
    """torch_checkpointing's CheckpointManager, with a save in a process."""

    name, who_syncs = "torch_checkpointing async", "no one"

    def __init__(self) -> None:
        from torch_checkpointing.config import AsyncCheckpointSaverConfig

        self._manager = _torch_checkpointing(AsyncCheckpointSaverConfig())

    def prepare(self, state: BenchState) -> None:
        self._manager.prewarm_staging(state.nested())

    def save(self, state: BenchState, folder: Path) -> Pending:
        written: Any = self._manager.save(str(folder), state.nested())

        def wait() -> None:
            with self._manager.lock():
                pass

        return Pending(wait, written)

    def settle(self) -> None: ...

    def close(self) -> None:
        self._manager.close()


class Torchsnapshot:
    """torchsnapshot's Snapshot.take and restore."""

    name, who_syncs = "torchsnapshot", "the bench: files"

    def save(self, state: BenchState, folder: Path) -> None:
        from torchsnapshot import Snapshot

        Snapshot.take(str(folder / "snapshot"), _snapshot(state))
        disk.sync_files(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(folder / "snapshot")).restore(_snapshot(target))

    def close(self) -> None: ...


class ByteCheckpoint:
    """bytecheckpoint's save and load of a model without parallelism; it needs a process group."""

    name, who_syncs = "bytecheckpoint", "the bench: files"

    def save(self, state: BenchState, folder: Path) -> None:
        import bytecheckpoint as bcp

        join_group_of_one()
        bcp.save(str(folder), {"model": _Holder(state.tensors())}, framework="ddp")
        disk.sync_files(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        import bytecheckpoint as bcp

        bcp.load(str(folder), {"model": _Holder(target.tensors())}, framework="ddp")

    def close(self) -> None: ...


PEERS: dict[str, type[Contender]] = {
    "torchtitan": Torchtitan,
    "torch_checkpointing": TorchCheckpointing,
    "torchsnapshot": Torchsnapshot,
    "bytecheckpoint": ByteCheckpoint,
}
"""Contenders by name, which is the name of the module."""

ASYNC_PEERS: dict[str, Any] = {
    "torchtitan async": lambda job: TorchtitanAsync(),
    "torch_checkpointing async": lambda job: TorchCheckpointingAsync(),
}
"""Contenders by name, which starts with the name of the module."""


def missing() -> dict[str, str]:
    """Return the peers that are not installed, each with the message to print."""
    return {
        module: f"not installed; python -m pip install {what}"
        for module, what in INSTALL.items()
        if not is_installed(module)
    }


class _Holder(nn.Module):
    """A module whose state dict is `tensors`, under their own names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return dict(self._tensors)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Copy tensors that were not read in place."""
        for name, tensor in self._tensors.items():
            if state_dict[name] is not tensor:
                tensor.copy_(state_dict[name])


class _Flat:
    """A stateful whose state is `values`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: tensors are read in place."""


def _torch_checkpointing(save: Any) -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # Its direct I/O writes from unaligned memory of torch.save, which ext4 refuses.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(CheckpointManager.Config(save=save, storage_config=storage))


def _snapshot(state: BenchState) -> dict[str, Any]:
    from torchsnapshot import StateDict

    return {"model": StateDict(**state.model), "optimizer": StateDict(**state.optimizer)}
