"""A complete checkpoint in another layout, or in another number of files.

Elements and small values are copied, never linked: tools that write DCP folders truncate files in place, and a file
that a sealed checkpoint shares would be lost with the copy. Every block that is read is verified on the way.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from torchtitan_lite import __version__
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.converting import new_output
from torchtitan_lite.converting.dcp_folder import NewState, Written, most_files, write_checkpoint
from torchtitan_lite.converting.exporting import Progress
from torchtitan_lite.converting.layouts import Reader, Relaid, as_nested, as_our_layout, as_stored, as_torchtitan
from torchtitan_lite.converting.new_output import NewOutput
from torchtitan_lite.converting.streamed_file import Advance, read_back
from torchtitan_lite.disk.block_reader import BlockReader, DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, FileRecord
from torchtitan_lite.disk.durable import DISK, Durable, naming
from torchtitan_lite.disk.lock_file import locked
from torchtitan_lite.disk.read_requests import Piece, ReadsBlocks
from torchtitan_lite.errors import CheckpointDamaged, CheckpointNotFound, ConfigError, TorchtitanLiteError
from torchtitan_lite.examining.derived_metadata import metadata_of
from torchtitan_lite.examining.file_digests import are_sound, block_ranges
from torchtitan_lite.examining.listed_tree import HeldFolder, held
from torchtitan_lite.examining.opened import OpenedCheckpoint, WrittenBy, open_checkpoint
from torchtitan_lite.examining.tensor_stream import TensorStream
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import Manifest, Table
from torchtitan_lite.store.manifest_fields import DCP_METADATA

Layout = Literal["dcp", "dcp, nested", "torchtitan", "ours"]
"""`dcp, nested` has the optimizer as a list of groups, the others by the names of parameters."""

_SAME = {"dcp": WrittenBy.DCP, "dcp, nested": WrittenBy.DCP, "torchtitan": WrittenBy.TORCHTITAN, "ours": WrittenBy.OURS}


def convert(opened: OpenedCheckpoint, out: Path, to: Layout, progress: Progress, *, dp_ranks: int = 0) -> NewOutput:
    """Write `opened` to the new folder `out` in the layout `to`. Raises as `export` does.

    What is in an object store in our layout is copied byte for byte, and a copy that was cut is continued.
    """
    if to == "ours" and opened.manifest is not None and not opened.folder.is_dir():
        return _mirrored(opened, opened.manifest, out, progress)
    if opened.origin is _SAME[to]:
        raise ConfigError(f"{opened.folder} has this layout already: copy it, or use reshard")
    reader = Reader(opened)
    by_layout: dict[Layout, Callable[[Reader], Relaid]] = {
        "dcp": as_stored,
        "dcp, nested": as_nested,
        "torchtitan": lambda given: as_torchtitan(given, dp_ranks),
        "ours": as_our_layout,
    }
    relaid = by_layout[to](reader)
    num_files = sum(map(layout.is_data_file, opened.sizes))
    num_files = max(1, min(num_files, most_files(relaid.state.tensors)))
    manifest = _new_manifest(opened, relaid, out, reader) if to == "ours" else None
    return write_new_checkpoint(out, relaid.state, num_files, reader.stream, progress, manifest, relaid.left_out)


def reshard_checkpoint(opened: OpenedCheckpoint, out: Path, num_files: int, progress: Progress) -> NewOutput:
    """Write the same content to `num_files` files in the new folder `out`. Raises as `export` does."""
    reader = Reader(opened)
    if opened.manifest is not None:
        _check_step(opened.manifest.step, out)
    return write_new_checkpoint(out, as_stored(reader).state, num_files, reader.stream, progress, opened.manifest)


def _mirrored(opened: OpenedCheckpoint, manifest: Manifest, out: Path, progress: Progress) -> NewOutput:
    _check_step(manifest.step, out)
    with (
        new_output.continued_folder(out) as folder,
        progress(f"Writing {out.name}", 2 * opened.nbytes) as advance,
    ):
        mirror(opened, manifest, folder, advance)
    return NewOutput([*manifest.files, layout.MANIFEST], len(manifest.tensors), opened.nbytes)


def write_new_checkpoint(
    out: Path,
    state: NewState,
    num_files: int,
    stream: TensorStream,
    progress: Progress,
    manifest: Manifest | None,
    left_out: Sequence[str] = (),
) -> NewOutput:
    """Write `state`, read from `stream`, to the new folder `out`, with `manifest`, which has no files and tables yet.

    Raises ConfigError before anything is written, what the stream raises, and OSError; `out` is not there then.
    """
    total = sum(tensor.num_bytes for tensor in state.tensors.values())
    with new_output.new_folder(out) as folder, progress(f"Writing {out.name}", 2 * total) as advance:
        written = write_checkpoint(folder, state, num_files, stream, advance)
        if manifest is not None:
            data = _of_files(manifest, written, state).to_readable_json()
            DISK.write_file(folder / layout.MANIFEST, data)
        # By the reader that a run uses, before the folder has its name.
        found = open_checkpoint(folder).contents
        if found.tensors.keys() != state.tensors.keys() or found.objects.keys() != state.objects.keys():
            raise TorchtitanLiteError(f"{out.name} was written, but other entries are found in it")
    size = sum(record.size for record in written.files.values())
    names = [*written.files, *([layout.MANIFEST] if manifest is not None else [])]
    return NewOutput(names, len(state.tensors), size, left_out)


def _of_files(manifest: Manifest, written: Written, state: NewState) -> Manifest:
    """Return `manifest` with the files and tables of the new checkpoint."""
    if "root" not in manifest.structure:
        for table in (written.tensors, written.objects):
            for key, entry in table.items():
                entry["path"] = list(state.paths[key])
    return dataclasses.replace(
        manifest,
        files=written.files,
        tensors=Table(written.tensors),
        objects=Table(written.objects),
        extra={name: value for name, value in manifest.extra.items() if name != DCP_METADATA},
    )


def _new_manifest(opened: OpenedCheckpoint, relaid: Relaid, out: Path, reader: Reader) -> Manifest:
    """Return a manifest, without files and tables, for a checkpoint that another tool wrote."""
    step = opened.step
    if step is None:
        found = reader.value("train_state.step")
        step = layout.parse_step(out.name) if found is None else int(found)
    _check_step(step or 0, out)
    versions = {"torchtitan_lite": __version__, "torch": torch.__version__}
    return Manifest(
        step=step or 0,
        kind=relaid.kind,
        created_at=time.time(),
        world_size=opened.saved_by.world_size or 1,
        versions=versions,
        files={},
        extra={"converted_from": opened.origin.value},
    )


def _check_step(step: int, out: Path) -> None:
    """Raise ConfigError if the name of `out` is that of another step: such a manifest counts as damaged."""
    named = layout.parse_step(out.name)
    if named is not None and named != step:
        raise ConfigError(f"{out} is the name of step {named}, and the checkpoint is of step {step}: name OUT after it")


# A copy of a checkpoint of ours on a disk: the same files, byte for byte, with the same manifest.
#
# A copy that was cut is continued. Its blocks have digests in the manifest, so what lies there is kept where it is
# right, and only the rest is fetched. The manifest comes last.


_SPAN_BLOCKS = 32
"""Fetched at a time; in memory, too."""


def mirror(opened: OpenedCheckpoint, manifest: Manifest, folder: Path, advance: Advance) -> None:
    """Write the files of `opened`, and `manifest` as it is there, to `folder`, synced, and check them.

    `folder` may have files of a copy that was cut; others go. Raises CheckpointDamaged, CheckpointUnreadable and the
    OSError of the disk; what is right in `folder` is taken by the next call.
    """
    files, on_disk = files_of(opened.folder), BlockReader()
    reader = files.reader()
    for left in folder.iterdir():
        if left.name not in manifest.files:
            DISK.remove_tree(left) if left.is_dir() else DISK.remove_file(left)
    for name, record in manifest.files.items():
        try:
            _mirror_file(files.path_of(name), record, (reader, on_disk), folder / name, advance)
        except DamagedRange as damage:
            finding = f"bytes {damage.begin} to {damage.end} of {name}: {damage.finding}"
            keys = opened.contents.keys_in(name, damage.begin, damage.end)
            raise CheckpointDamaged(str(opened.folder), finding, keys) from None
    for name, record in manifest.files.items():
        read_back(folder / name, record, on_disk, advance)
    with files.opened(layout.MANIFEST) as fd, os.fdopen(fd, "rb", closefd=False) as file:
        data = file.read()
    Manifest.parse(data, str(files.path_of(layout.MANIFEST)))  # It has a digest of itself.
    DISK.write_file(folder / layout.MANIFEST, data)
    DISK.fsync_dir(folder)


def _mirror_file(
    source: Path, record: FileRecord, readers: tuple[ReadsBlocks, BlockReader], to: Path, advance: Advance
) -> None:
    if record.size and not record.blocks:
        raise DamagedRange(source, 0, record.size, f"there are no digests of it in {layout.MANIFEST}")
    (reader, on_disk), buffer = readers, memoryview(bytearray(min(_SPAN_BLOCKS * BLOCK_BYTES, record.size)))
    with _open_mirror(to) as fd:
        DISK.set_size(fd, record.size)
        for blocks in block_ranges(record.size, _SPAN_BLOCKS):
            begin = blocks.start * BLOCK_BYTES
            span = buffer[: min(blocks.stop * BLOCK_BYTES, record.size) - begin]
            if not are_sound(on_disk, to, record, blocks):
                reader.read(source, record, [Piece(begin, span)])
                done = 0
                while done < len(span):
                    done += DISK.write_at(fd, span[done:], begin + done)
            advance(len(span))
        DISK.fsync_file(fd)


@contextmanager
def _open_mirror(path: Path) -> Iterator[int]:
    """Yield a descriptor of `path`, which may be there already."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        with naming(path):
            yield fd
    finally:
        os.close(fd)


# DCP's `.metadata` for a checkpoint that was saved without.
#
# A kill leaves what was there, and a file under a temporary name, which the next call replaces.


def add_metadata(folder: Path, durable: Durable = DISK) -> int:
    """Write `.metadata` into the checkpoint in `folder`, durably; return its bytes. A cut leaves it without.

    Raises as `CheckpointFolder.manifest`, CheckpointNotFound if a job removed or replaced the checkpoint meanwhile,
    ConfigError if another process adds the file, and OSError.
    """
    # A job may put another checkpoint into the place of this one, which must not get its file.
    with held(folder) as same:
        data = metadata_of(CheckpointFolder(folder, "size"))
        _refuse_if_gone(same)
        try:
            with locked(same.path, wait_seconds=0):
                durable.write_atomically(same.path / layout.METADATA, data)
        except BlockingIOError:
            raise ConfigError(f"another process is writing {layout.METADATA} in {folder}: wait until it ends") from None
        _refuse_if_gone(same)
        return len(data)


def _refuse_if_gone(same: HeldFolder) -> None:
    if not same.has_its_name():
        raise CheckpointNotFound(str(same.folder), None, finding="it was removed or replaced meanwhile")
