"""What is measured beside each other: each saves a state into a folder and loads it into memory that is there."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports it
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from checkpoint_bench.disk import Raw, Touched, sync_files
from checkpoint_bench.states import BenchState


class Contender(Protocol):
    """Saves while the caller waits."""

    name: str
    who_syncs: str
    """Who asks the disk to keep what was written: the contender itself, or the bench, within the time it measures."""
    measures_memory: bool

    def save(self, state: BenchState, folder: Path) -> None:
        """`folder`, which is there and empty, has the checkpoint, durably."""
        ...

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        """`target`, whose memory is there already, has what was saved."""
        ...

    def close(self) -> None: ...


@dataclass
class Pending:
    """A save in the background."""

    wait_until_staged: Callable[[], object]
    """Returns when the state may change."""
    durable: Future[Any]


class AsyncContender(Protocol):
    """Saves in the background."""

    name: str
    who_syncs: str

    def prepare(self, state: BenchState) -> None:
        """What its user would do before the training loop, if there is such a thing, is done."""
        ...

    def save(self, state: BenchState, folder: Path) -> Pending:
        """Sets off a save."""
        ...

    def settle(self) -> None:
        """Called when a save is durable, outside of what is measured."""
        ...

    def close(self) -> None: ...


class RawDisk:
    """The disk itself, the same bytes."""

    name, who_syncs, measures_memory = "raw", "itself: fdatasync", False

    def __init__(self, buffer: Touched) -> None:
        self._raw = Raw(buffer)

    def save(self, state: BenchState, folder: Path) -> None:
        self._raw.write(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        self._raw.read(folder, warm=warm)

    def close(self) -> None: ...


class Dcp:
    """torch.distributed.checkpoint, as it is called without any option."""

    name, who_syncs, measures_memory = "dcp", "itself: files and .metadata, no folder", True

    def save(self, state: BenchState, folder: Path) -> None:
        dcp_save(state.nested(), checkpoint_id=folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        dcp_load(target.nested(), checkpoint_id=folder)

    def close(self) -> None: ...


class TorchSave:
    """torch.save of the nested state; what torch.load maps is copied into the target."""

    name, who_syncs, measures_memory = "torch.save", "the bench: file", True

    def save(self, state: BenchState, folder: Path) -> None:
        torch.save(state.nested(), folder / "state.pt")
        sync_files(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        loaded = torch.load(folder / "state.pt", mmap=True, weights_only=True)
        for key, tensors in (("model", target.model), ("optimizer", target.optimizer)):
            for name, tensor in tensors.items():
                tensor.copy_(loaded[key][name])

    def close(self) -> None: ...


class Safetensors:
    """safetensors' save_file of all tensors; what safe_open maps is copied into the target."""

    name, who_syncs, measures_memory = "safetensors", "the bench: file", True

    def save(self, state: BenchState, folder: Path) -> None:
        from safetensors.torch import save_file

        save_file(state.tensors(), folder / "state.safetensors")
        sync_files(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        from safetensors import safe_open

        with safe_open(folder / "state.safetensors", "pt") as file:
            for name, tensor in target.tensors().items():
                tensor.copy_(file.get_tensor(name))

    def close(self) -> None: ...


class DcpAsync:
    """dcp.async_save, in a thread or in a process; with `shared`, through the stager with shared memory."""

    who_syncs = Dcp.who_syncs

    def __init__(self, kind: AsyncCheckpointerType, *, shared: bool = False) -> None:
        self._kind = kind
        # No pinned memory: where there is no accelerator the stager refuses it.
        self._stager = DefaultStager(StagingOptions(False, True, True, False)) if shared else None
        self.name = f"dcp {kind.value}" + (", shared memory" if shared else "")

    def prepare(self, state: BenchState) -> None:
        join_alone()

    def save(self, state: BenchState, folder: Path) -> Pending:
        answer: Any = async_save(
            state.nested(),
            checkpoint_id=folder,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(answer, Future):
            return Pending(lambda: None, answer)
        return Pending(answer.staging_completion.result, answer.upload_completion)

    def settle(self) -> None: ...

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        dist.destroy_process_group()


def join_alone() -> None:
    """There is a process group, of this process alone; some libraries want one."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    if not dist.is_initialized():
        store = TCPStore("localhost", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def is_installed(module: str) -> bool:
    """Whether `module` can be imported."""
    return importlib.util.find_spec(module) is not None
