"""The contenders: each saves a state into a folder and loads it into existing memory."""

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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it as exported
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from checkpoint_bench.disk import Raw, Touched, sync_files
from checkpoint_bench.states import BenchState


class Contender(Protocol):
    """A contender that saves while the caller waits."""

    name: str
    who_syncs: str
    """Who syncs the files: the contender itself, or the bench within the measured time."""

    def save(self, state: BenchState, folder: Path) -> None:
        """Write the checkpoint into `folder`, an existing empty one, and make it durable."""
        ...

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        """Read the checkpoint into the existing memory of `target`."""
        ...

    def close(self) -> None: ...


@dataclass
class Pending:
    """A save in the background."""

    wait_until_staged: Callable[[], object]
    """Block until the state may change."""
    durable: Future[Any]


class AsyncContender(Protocol):
    """A contender that saves in the background."""

    name: str
    who_syncs: str

    def prepare(self, state: BenchState) -> None:
        """Do what a user does before the training loop, if anything."""
        ...

    def save(self, state: BenchState, folder: Path) -> Pending:
        """Start a save."""
        ...

    def settle(self) -> None:
        """Clean up after a save that is durable, outside of the measured time."""
        ...

    def close(self) -> None: ...


class RawDisk:
    """The raw disk, with the same number of bytes."""

    name, who_syncs = "raw", "itself: fdatasync"

    def __init__(self, buffer: Touched) -> None:
        self._raw = Raw(buffer)

    def save(self, state: BenchState, folder: Path) -> None:
        self._raw.write(folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        self._raw.read(folder, warm=warm)

    def close(self) -> None: ...


class Dcp:
    """torch.distributed.checkpoint with its default options."""

    name, who_syncs = "dcp", "itself: files and .metadata, no folder"

    def save(self, state: BenchState, folder: Path) -> None:
        dcp_save(state.nested(), checkpoint_id=folder)

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        dcp_load(target.nested(), checkpoint_id=folder)

    def close(self) -> None: ...


class TorchSave:
    """torch.save of the nested state. The load maps the file with torch.load and copies it into the target."""

    name, who_syncs = "torch.save", "the bench: file"

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
    """safetensors' save_file of all tensors. The load maps the file with safe_open and copies it into the target."""

    name, who_syncs = "safetensors", "the bench: file"

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
    """dcp.async_save in a thread or a process; with `shared`, with the stager for shared memory."""

    who_syncs = Dcp.who_syncs

    def __init__(self, kind: AsyncCheckpointerType, *, shared: bool = False) -> None:
        self._kind = kind
        # No pinned memory: the stager refuses it without an accelerator.
        self._stager = DefaultStager(StagingOptions(False, True, True, False)) if shared else None
        self.name = f"dcp {kind.value}" + (", shared memory" if shared else "")

    def prepare(self, state: BenchState) -> None:
        join_group_of_one()

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


def join_group_of_one() -> None:
    """Make a process group of only this process, which some libraries need."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    if not dist.is_initialized():
        store = TCPStore("localhost", 0, 1, is_master=True)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def is_installed(module: str) -> bool:
    """Return whether `module` can be imported."""
    return importlib.util.find_spec(module) is not None
