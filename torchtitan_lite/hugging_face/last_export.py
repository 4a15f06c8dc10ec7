"""The weights of a run's last step in Hugging Face's format: written by all ranks, there only when complete.

They are read from the committed checkpoint, not from memory, so a later start can write what a killed one did not. A
record in the folder has the run, the step, the dtype and the size of each file: an export of another run, of a branch
that was left, or that was cut short later, is not this run's.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_lite import faults
from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.config.job_config import JobConfig, Training
from torchtitan_lite.converting import new_output, safetensors_files
from torchtitan_lite.disk.durable import DISK
from torchtitan_lite.errors import ConfigError, SaveFailed, TorchtitanLiteError
from torchtitan_lite.events import WeightsExported
from torchtitan_lite.examining.opened import OpenedCheckpoint, open_checkpoint
from torchtitan_lite.hugging_face.model_files import DescribedModel
from torchtitan_lite.hugging_face.writing import PlannedExport, plan, write_rest, write_shards
from torchtitan_lite.json_lines import object_in
from torchtitan_lite.log import logger, readable_bytes
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointInfo

T = TypeVar("T")

RECORD = "export.json"
"""Next to the model's files: whose export it is."""
_TOKENIZER_OF_DATA = "dataloader.tokenizer"


class HuggingFaceExport:
    """Writes `model` into `checkpoint.hf_folder`. Raises ExtraMissing if the package safetensors is not installed."""

    def __init__(
        self,
        config: JobConfig,
        model: DescribedModel,
        folders: RunFolders,
        context: RunContext,
    ) -> None:
        safetensors_files.require_library()
        self.root = (Path(config.job.dump_folder) / config.checkpoint.hf_folder).absolute()
        self._dtype = config.checkpoint.export_dtype
        # A loop of one's own configures checkpoints alone: the rest is defaults, and not its settings.
        self._has_settings = config.training != Training()
        self._last_step = config.training.steps
        self._model = model
        self._folders = folders
        self._peers, self._clock, self._emit = context.peers, context.clock, context.emit

    def refuse_foreign_folder(self) -> None:
        """Raise ConfigError if something that no run wrote has the place of the export at the last step. Any rank.

        A loop of one's own does not configure its last step: there `write` finds out.
        """
        if self._has_settings:
            self._refuse_foreign(self._folder(self._last_step))

    def made(self, checkpoint: CheckpointInfo) -> bool:
        """Return whether the complete export of `checkpoint`, in the wanted dtype, is there. **Coordinator only**.

        Reads a record and sizes of files.
        """
        folder = self._folder(checkpoint.step)
        record = _export_record(folder)
        if {key: record.get(key) for key in ("run_id", "dtype")} != self._identity(checkpoint):
            return False
        files = record.get("files")
        try:
            return isinstance(files, dict) and all(
                (folder / str(name)).stat().st_size == size for name, size in files.items()
            )
        except OSError:
            return False

    def write(self, step: int) -> None:
        """Write the export of the committed checkpoint of `step`, durable on return. **Collective**.

        The other ranks wait at most `checkpoint.timeout_seconds` for the slowest one. Raises `SaveFailed`, and what
        reading the checkpoint raises; an older export of the step is there then as before, and so is the checkpoint.
        """
        began = self._clock()
        logger.info("Saving the weights in Hugging Face's format in %s at last step, step %d.", self._dtype, step)
        with ExitStack() as stack:
            place = self._on_coordinator(step, lambda: stack.enter_context(self._place(step)))
            planned = self._peers.together(lambda: self._named(step, lambda: self._write_share(step, place)))
            num_bytes = self._on_coordinator(step, lambda: self._complete(step, planned, place))
            self._on_coordinator(step, stack.close)
        seconds = self._clock() - began
        out = self._folder(step)
        logger.info(
            "Saved step %d in Hugging Face's format: %s in %.2f s, in %s", step, readable_bytes(num_bytes), seconds, out
        )
        self._emit(WeightsExported(step, path=str(out), bytes=num_bytes, seconds=seconds))

    @contextmanager
    def _place(self, step: int) -> Iterator[Path]:
        """Yield a folder that is in the place of the export if the block ends without an error."""
        out = self._folder(step)
        whole = self.root / layout.staging_dir(step, secrets.token_hex(4))
        self._refuse_foreign(out)
        for left in self.root.glob("*"):
            if layout.parse_staging(left.name.removeprefix(".").removesuffix(".unfinished")) is not None:
                # By a process that was killed before it renamed it, maybe at an earlier step.
                DISK.remove_tree(left)
        with new_output.new_folder(whole) as folder:
            yield folder
        # Right before the rename, because another job may have the folder by now.
        self._folders.checkpoints.check_lease()
        faults.point("hugging_face", step=step, path=out)
        is_exchanged = os.path.lexists(out) and DISK.exchange(whole, out)
        if not is_exchanged:
            if os.path.lexists(out):
                DISK.remove_tree(out)
            DISK.rename(whole, out)
        DISK.fsync_dir(self.root)
        # After the sync: until then a power cut may undo the exchange.
        if is_exchanged:
            DISK.remove_tree(whole)

    def _refuse_foreign(self, out: Path) -> None:
        if os.path.lexists(out) and not _export_record(out):
            raise ConfigError(f"checkpoint.hf_folder: {out} exists, and no run wrote it. Move it away.")

    def _write_share(self, step: int, place: Path) -> PlannedExport:
        """Write this rank's shards into `place`. Any rank."""
        opened = open_checkpoint(self._folders.checkpoints.get(step).path)
        self._refuse_other_tokenizer(opened)
        name = str(Path(self.root.name) / layout.step_dir(step))
        planned = plan(
            opened,
            self._model,
            name=name,
            dtype=self._dtype,
            of_trainer=self._has_settings,
        )
        write_shards(planned, place, share_of([*planned.shards], self._peers.rank, self._peers.world_size))
        return planned

    def _refuse_other_tokenizer(self, opened: OpenedCheckpoint) -> None:
        """Raise ConfigError if the run was trained with another tokenizer: of the same size, nothing else shows it."""
        recorded, now = opened.contents.objects.get(_TOKENIZER_OF_DATA), self._model.tokenizer
        if now and recorded is not None and isinstance(recorded.value, str) and recorded.value != now:
            raise ConfigError(
                f"model.tokenizer_path: expected the tokenizer of {opened.folder}, with the fingerprint "
                f"{recorded.value}, found {now}. Put the old tokenizer back."
            )

    def _complete(self, step: int, planned: PlannedExport, place: Path) -> int:
        """Write all else into `place`, the record last; return the bytes of the folder."""
        write_rest(planned, place)
        sizes = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
        record = {"step": step, **self._identity(self._folders.checkpoints.get(step)), "files": sizes}
        # Last: a folder without a record is not taken for an export.
        DISK.write_file(place / RECORD, (json.dumps(record, indent=2) + "\n").encode())
        return sum(sizes.values())

    def _identity(self, checkpoint: CheckpointInfo) -> dict[str, str]:
        return {"run_id": checkpoint.run_id, "dtype": self._dtype}

    def _folder(self, step: int) -> Path:
        return self.root / layout.step_dir(step)

    def _on_coordinator(self, step: int, act: Callable[[], T]) -> T:
        return self._peers.on_coordinator(lambda: self._named(step, act))

    def _named(self, step: int, act: Callable[[], T]) -> T:
        """Return what `act` does; an OSError becomes the failure of this step's export."""
        try:
            return act()
        except TorchtitanLiteError:
            raise
        except OSError as error:
            raise SaveFailed(
                step,
                f"{self._folder(step)}, in Hugging Face's format, was not written: {error}. The checkpoint itself is "
                "durable: start the same command again to write what is missing",
            ) from error


def share_of(files: Sequence[str], rank: int, num_ranks: int) -> list[str]:
    """Return the `files` that `rank` writes; fewer files than ranks go to ranks far apart, on different hosts."""
    if len(files) >= num_ranks:
        return [*files[rank::num_ranks]]
    return [name for at, name in enumerate(files) if at * num_ranks // len(files) == rank]


def _export_record(folder: Path) -> dict[str, Any]:
    """Return the record in `folder`; empty if there is none that can be read."""
    try:
        return object_in((folder / RECORD).read_bytes()) or {}
    except OSError:
        return {}
