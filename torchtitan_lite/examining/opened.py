"""Any checkpoint, opened without torch: ours, DCP's or another library's; in an object store only ours.

Nothing is changed, and no tensor is read. Only our manifest records what a checkpoint is. For one without a manifest
it follows from the names of its entries, its folder and its files; what does not follow is None or empty:

- kind: full if it has the state of an optimizer, else weights-only
- step: the number in the folder's name
- ranks: as many as wrote a file
- time: that of `.metadata`
- lineage, configuration, topology, versions, digests: unknown
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.format.dtypes import DTYPES
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.errors import CheckpointNotFound, reading
from torchtitan_lite.examining.other_libraries import (
    GENERATORS,
    absence_in,
    contents_in,
    contents_of,
    description_of,
    is_lightning_file,
    is_lightning_folder,
    lightning_step_of,
    transformers_step_of,
)
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind, Manifest
from torchtitan_lite.store.manifest_fields import CONFIG, TOPOLOGY
from torchtitan_lite.store.place import Place, home_of, on_disk

POSITIONS_OF_TORCHTITAN = "dataloader.dp_rank_"
"""The prefix of the keys under which torchtitan saves each data-parallel rank's position in the data."""


class WrittenBy(enum.Enum):
    """What wrote a checkpoint, as far as can be seen."""

    OURS = "torchtitan_lite"
    TORCHTITAN = "torchtitan"
    """No manifest, and the position of torchtitan's dataloader among its objects."""
    DCP = "dcp"
    """Anything else with DCP's metadata, a weights-only checkpoint of torchtitan included."""
    TRANSFORMERS = "transformers"
    """A checkpoint of its Trainer, or a model in its safetensors files."""
    ACCELERATE = "accelerate"
    """What `save_state` wrote."""
    LIGHTNING = "lightning"
    """A file that is not read, or a folder of DCP."""

    @property
    def library(self) -> str:
        """The name of the library for a person."""
        return {"dcp": "plain DCP", "lightning": "Lightning"}.get(self.value, self.value)


OF_HUGGING_FACE = (WrittenBy.TRANSFORMERS, WrittenBy.ACCELERATE)


@dataclass(frozen=True)
class SavingJob:
    """The job that saved a checkpoint, as far as it is known."""

    world_size: int | None = None
    topology: str = ""
    """Its degrees of parallelism, as in "dp_shard 2 x tp 2"; empty if unknown."""
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    """Its configuration, section by section; empty if unknown."""

    @classmethod
    def of(cls, manifest: Manifest) -> SavingJob:
        """Return the job that wrote `manifest`."""
        return cls(manifest.world_size, str(manifest.extra.get(TOPOLOGY, "")), manifest.extra.get(CONFIG, {}))


@dataclass(frozen=True)
class OpenedCheckpoint:
    """What is known of the checkpoint in `folder` before any tensor is read."""

    folder: Place
    origin: WrittenBy
    contents: Contents
    """Its tensors and objects, checked: the files can hold them, and have the sizes of the manifest."""
    manifest: Manifest | None
    sizes: Mapping[str, int]
    """Bytes of each file of the checkpoint, by name; the manifest itself is not among them."""
    kind: CheckpointKind
    step: int | None
    saved_by: SavingJob
    created_at: float
    """Unix seconds."""

    @property
    def home(self) -> Place:
        """The folder of its files; of a checkpoint that is one file, the folder where that is."""
        return home_of(self.folder)

    @property
    def records(self) -> Mapping[str, FileRecord]:
        """Size and digests of each file, by the manifest; nothing without one."""
        return {} if self.manifest is None else self.manifest.files

    @property
    def extra(self) -> Mapping[str, Any]:
        """What else its manifest says; nothing without one."""
        return {} if self.manifest is None else self.manifest.extra

    @property
    def nbytes(self) -> int:
        """Bytes of all its files but the manifest."""
        return sum(self.sizes.values())


def open_checkpoint(folder: Place) -> OpenedCheckpoint:
    """Return the checkpoint in `folder`, on disk or in an object store.

    Raises CheckpointNotFound if there is none or only a part of one, CheckpointDamaged, CheckpointUnsafe,
    CheckpointUnreadable or FormatTooNew.
    """
    is_file = folder.is_file() and is_lightning_file(on_disk(folder))
    if not is_file and (finding := absence(folder)):
        raise CheckpointNotFound(str(folder), None, finding=finding)
    description = on_disk(folder) if is_file else description_of(on_disk(folder)) if folder.is_dir() else None
    if description is not None:
        with reading(folder):
            contents = contents_of(description) if is_file else contents_in(on_disk(folder))
            contents.check_names()
            sizes = files_of(Path(contents.path)).sizes_of(contents.files)
        contents.check(sizes)
        origin = WrittenBy.LIGHTNING if is_file else origin_by(description)
        parse_step = lightning_step_of if is_file else transformers_step_of
    else:
        opened = CheckpointFolder(folder, "size", DTYPES)
        manifest = opened.manifest
        if manifest is None and not folder.is_dir():  # It was removed meanwhile.
            raise CheckpointNotFound(str(folder), None, finding=absence(folder))
        contents = opened.contents
        with reading(folder):
            names = {*contents.files, layout.METADATA} if manifest is None else {*manifest.files}
            sizes = opened.files.sizes_of(names)
        if manifest is not None:
            what = manifest.kind, manifest.step, SavingJob.of(manifest), manifest.created_at
            return OpenedCheckpoint(folder, WrittenBy.OURS, contents, manifest, dict(sorted(sizes.items())), *what)
        description, parse_step = on_disk(folder) / layout.METADATA, layout.parse_step
        is_torchtitan = any(key.startswith(POSITIONS_OF_TORCHTITAN) for key in contents.objects)
        origin = WrittenBy.TORCHTITAN if is_torchtitan else WrittenBy.DCP
        if is_lightning_folder(on_disk(folder)):
            origin, parse_step = WrittenBy.LIGHTNING, lightning_step_of
    with reading(folder):
        created_at = description.lstat().st_mtime
    return OpenedCheckpoint(
        folder,
        origin,
        contents,
        manifest=None,
        sizes=dict(sorted(sizes.items())),
        kind=CheckpointKind.FULL if is_file else kind_from_keys(contents),
        step=parse_step(on_disk(folder).absolute().name),
        saved_by=SavingJob(num_writers(sizes) or None),
        created_at=created_at,
    )


def absence(folder: Place) -> str:
    """Return why there is no complete checkpoint in `folder`, in a few words; the empty string if there may be one."""
    files = files_of(folder)
    if (finding := files.absence()) or not folder.is_dir():
        return finding
    names = {*files.names}
    if layout.parse_staging(folder.absolute().name) is not None:
        return "a save into it is under way or was cut off"
    if names & {layout.MANIFEST, layout.METADATA}:
        return ""
    if description_of(path := on_disk(folder)) is not None or transformers_step_of(path.absolute().name) is not None:
        return absence_in(path)
    if any(map(layout.is_data_file, names)):
        return f"there are files of tensors in it, but no {layout.METADATA}"
    return f"there is neither {layout.MANIFEST} nor {layout.METADATA} in it"


def origin_by(description: Path) -> WrittenBy:
    """Return which of the two libraries wrote the folder that has this `description`."""
    return WrittenBy.ACCELERATE if description.name == GENERATORS else WrittenBy.TRANSFORMERS


def kind_from_keys(keys: Iterable[str]) -> CheckpointKind:
    """Return the kind of a checkpoint without a manifest that has these keys."""
    has_optimizer = any(key.startswith("optim") and "." in key for key in keys)
    return CheckpointKind.FULL if has_optimizer else CheckpointKind.WEIGHTS_ONLY


def num_writers(files: Iterable[str]) -> int:
    """Return how many ranks wrote the data files among `files`."""
    return len({rank for name in files if (rank := layout.rank_of(name)) is not None})
