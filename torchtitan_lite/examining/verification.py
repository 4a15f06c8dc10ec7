"""Verify a checkpoint where it lies, on disk or in an object store, without a job and without torch.

`look_at` compares the manifest with itself and with the names and sizes of the files; `read_through` then reads every
byte, and compares it with the digests in the manifest, or in a record of ours about another library's checkpoint, and
where there are none, with the checksums that torch.save put into each item. Both return all findings instead of
stopping at the first one, and each names its file and the tensors in it. Nothing is changed. A checkpoint that a
running job removes meanwhile raises `CheckpointNotFound`, because files that are gone with it are no damage. An error
of the machine is no damage either, and is raised.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_lite.checkpoint.format.contents import Contents
from torchtitan_lite.checkpoint.reading.files import Identity, StoredFiles, files_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder, complete_manifest
from torchtitan_lite.checkpoint.untrusted.safe_metadata import read_metadata
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.plain_file import read_plain
from torchtitan_lite.disk.read_requests import ReadsBlocks
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointUnreadable,
    CheckpointUnsafe,
    reading,
)
from torchtitan_lite.examining.file_digests import Finding, OnBytes, compare_digests
from torchtitan_lite.examining.item_checksums import Checked, PlacedItem, check_items
from torchtitan_lite.examining.opened import absence
from torchtitan_lite.examining.other_libraries import contents_in, contents_of, description_of
from torchtitan_lite.examining.presence import checkpoint_identity, refuse_if_gone
from torchtitan_lite.examining.recorded_digests import read_record
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import recorded_sizes
from torchtitan_lite.store.known_manifests import damage_in
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.manifest_fields import DCP_METADATA
from torchtitan_lite.store.place import Place, home_of, on_disk
from torchtitan_lite.store.protocol import CORRUPT, SetAside


@dataclass(frozen=True)
class Looked:
    """A checkpoint, and what the checks found that need none of its data."""

    path: Place
    identity: Identity
    """What differs once another checkpoint has its name."""
    manifest: Manifest | None = None
    """None if it is damaged, and for plain DCP's."""
    recorded: Manifest | None = None
    """What was recorded of a checkpoint without a manifest; None if nothing was."""
    contents: Contents | None = None
    """None if they are damaged."""
    findings: tuple[Finding, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each file that is there with its right size."""
    unknown: tuple[str, ...] = ()
    """Names in the folder that nothing describes."""

    @property
    def num_bare(self) -> int:
        """Return the number of tensors that are no items of `torch.save`, so that nothing but a digest checks them."""
        tensors = self.contents.tensors.values() if self.contents is not None else ()
        return sum(tensor.runs is None and any(chunk.item is None for chunk in tensor.chunks) for tensor in tensors)

    @property
    def folder(self) -> Place:
        """Return where its files are."""
        return home_of(self.path)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all these files."""
        return sum(self.sizes.values())

    @property
    def has_digests(self) -> bool:
        """Return whether there are digests of the files."""
        return any(record.blocks for record in self.records.values())

    @property
    def records(self) -> Mapping[str, FileRecord]:
        """Return the size and digests of each file, by the manifest or the record; nothing if there is neither."""
        described = self.manifest or self.recorded
        return described.files if described is not None else {}


def look_at(folder: Place, record: Path | None = None) -> Looked:
    """Check the checkpoint in `folder`: its manifest, names, sizes, and that chunks cover each tensor exactly once.

    Without a manifest, it is also compared with `record`, if that is there. Of Lightning it may be a single file.
    Raises `CheckpointNotFound` if there is no checkpoint, or none any more; `FormatTooNew`; `CheckpointUnreadable`.
    """
    identity = checkpoint_identity(folder)
    if identity is None or (absence(folder) and not folder.is_file()):
        raise CheckpointNotFound(str(folder), None, finding=absence(folder))
    try:
        with no_collection(), reading(folder):
            looked = _looked(Looked(folder, identity), record)
    except CheckpointUnreadable:
        refuse_if_gone(folder, identity)
        raise
    if looked.findings:
        refuse_if_gone(folder, identity)
    return looked


def read_through(
    looked: Looked, on_bytes: OnBytes = lambda count: None, make_reader: Callable[[], ReadsBlocks] | None = None
) -> Checked:
    """Read every byte of the files in `looked.sizes` and compare it. Raises as `look_at` does."""
    files, records = files_of(looked.folder), looked.records
    with_digests = {file: records[file] for file in looked.sizes if file in records and records[file].blocks}
    items = list(_placed_items(looked, looked.sizes.keys() - with_digests.keys()))
    try:
        make_reader = make_reader or files.thread_reader
        findings = compare_digests(files, with_digests, looked.contents, on_bytes, make_reader)
        checked = _without_digests(looked, items, on_bytes)
    except CheckpointUnreadable:
        refuse_if_gone(looked.path, looked.identity)
        raise
    checked.findings = (*findings, *checked.findings)
    if looked.manifest is not None and DCP_METADATA in looked.manifest.extra and looked.path.is_dir():
        checked.findings += tuple(_of_added_metadata(on_disk(looked.path)))
    if checked.findings:
        refuse_if_gone(looked.path, looked.identity)
    return checked


def _without_digests(looked: Looked, items: Sequence[PlacedItem], on_bytes: OnBytes) -> Checked:
    """Read `items`, and the tensors that are none; each tensor with NaN is named if no file has digests."""
    contents = looked.contents
    if contents is None or looked.has_digests:
        return check_items(looked.folder, items, on_bytes)
    from torchtitan_lite.examining.bare_tensors import finder, nan_in  # numpy, which is seldom needed.

    checked = check_items(looked.folder, items, on_bytes, finder)
    try:
        if looked.num_bare and not looked.findings:
            checked.nan_in += nan_in(looked.folder, contents, on_bytes)
    except CheckpointDamaged as error:
        checked.findings = (finding_of(looked.folder, error), *checked.findings)
    checked.num_items += looked.num_bare
    checked.num_without_checksum += looked.num_bare
    found = {*checked.nan_in}
    checked.nan_in = [key for key in contents.tensors if key in found]
    return checked


def _looked(looked: Looked, record: Path | None) -> Looked:
    place, folder, files = looked.path, looked.folder, files_of(looked.folder)
    try:
        manifest = None if place.is_file() else complete_manifest(files, folder)
        step = layout.parse_step(folder.name)
        if manifest is not None and step is not None and manifest.step != step:
            raise CheckpointDamaged(str(folder), f"{layout.MANIFEST}: it is the manifest of step {manifest.step}")
        recorded = None
        if manifest is None and record is not None:
            recorded = read_record(record, on_disk(place))
        looked = dataclasses.replace(looked, manifest=manifest, recorded=recorded)
        contents = _described_contents(place, manifest)
        contents.check_names()
    except (CheckpointDamaged, CheckpointUnsafe) as error:
        return dataclasses.replace(looked, findings=(finding_of(folder, error),))
    except FileNotFoundError:
        # Without a manifest the contents are in that file.
        return dataclasses.replace(looked, findings=(Finding(layout.METADATA, "it is missing"),))
    sizes_before = recorded_sizes(looked.records)
    findings, sizes = _of_sizes(files, contents, sizes_before)
    # A file of another size is one finding, not one for each tensor in it.
    findings += _of_coverage(contents, sizes if manifest is None else sizes_before)
    at_top = {name.partition("/")[0] for name in {*sizes_before, *contents.files}}
    described = {*at_top, layout.MANIFEST, layout.METADATA, layout.DIGESTS}
    others = () if place.is_file() else files.names
    unknown = tuple(sorted(name for name in others if name not in described))
    return dataclasses.replace(looked, contents=contents, findings=tuple(findings), sizes=sizes, unknown=unknown)


def _described_contents(place: Place, manifest: Manifest | None) -> Contents:
    """Return what `manifest` describes; on disk and without one, what another library wrote."""
    if manifest is not None:
        return Contents.of_manifest(manifest, str(place))
    if place.is_file():
        return contents_of(on_disk(place))
    if not place.is_dir():
        raise CheckpointDamaged(str(place), f"{layout.MANIFEST} is missing")
    folder = on_disk(place)
    return read_metadata(folder) if description_of(folder) is None else contents_in(folder)


def _of_sizes(
    files: StoredFiles, contents: Contents, recorded: Mapping[str, int]
) -> tuple[list[Finding], dict[str, int]]:
    """Return what is wrong with the sizes of all files, and the sizes of the others."""
    findings, sizes = [], {}
    for name, size in sorted(recorded.items()):
        if text := files.size_finding(name, size):
            keys = tuple(contents.keys_in(name, files.sound_bytes(name, size), math.inf))
            findings.append(Finding(name, f"it {text.removeprefix(f'{Path(name).name} ')}", keys))
        else:
            sizes[name] = size
    own = {layout.METADATA} if contents.described_in == layout.METADATA and not recorded else set()
    for name in sorted((contents.files | own) - recorded.keys()):
        try:
            sizes |= files.sizes_of([name])
            text = "" if name in sizes else "it is missing"
        except CheckpointUnsafe as error:
            text = error.finding
        if text:
            findings.append(Finding(name, text, tuple(contents.keys_in(name, 0, math.inf))))
    return findings, sizes


def _of_coverage(contents: Contents, sizes: Mapping[str, int]) -> list[Finding]:
    """Return what is wrong with each tensor and object, if files of these `sizes` are to hold them."""
    try:
        contents.check(sizes)
        return []
    except CheckpointDamaged as error:
        whole = error
    findings = []
    for key in contents:
        if key in contents.tensors:
            one = dataclasses.replace(contents, tensors={key: contents.tensors[key]}, objects={})
        else:
            one = dataclasses.replace(contents, tensors={}, objects={key: contents.objects[key]})
        if one.files - sizes.keys():
            continue  # That file is a finding already.
        try:
            one.check(sizes)
        except CheckpointDamaged as error:
            findings.append(Finding("", error.finding, (key,)))
    return findings or ([] if contents.files - sizes.keys() else [Finding("", whole.finding)])


def _of_added_metadata(folder: Path) -> list[Finding]:
    """Return what is wrong with the `.metadata` of a checkpoint that was saved without; nothing if there is none."""
    if not os.path.lexists(folder / layout.METADATA):
        return []
    from torchtitan_lite.examining.derived_metadata import metadata_of  # torch, which is seldom needed

    try:
        expected = metadata_of(CheckpointFolder(folder, "size"))
        if read_plain(folder / layout.METADATA, len(expected)) == expected:
            return []
    except CheckpointUnsafe as error:
        return [Finding(layout.METADATA, error.finding)]
    return [Finding(layout.METADATA, "it does not describe this checkpoint: add it again with add-metadata")]


def _placed_items(looked: Looked, files: AbstractSet[str]) -> list[PlacedItem]:
    """Return the items in `files`, as far as they are inside: others are findings already."""
    if looked.contents is None or not files:
        return []
    placed = []
    for key, tensor in looked.contents.tensors.items():
        for chunk in tensor.chunks:
            if chunk.item is not None:
                placed.append(PlacedItem(chunk.item, key, tensor.dtype, chunk.sizes))
    for key, stored in looked.contents.objects.items():
        if stored.item is not None:
            placed.append(PlacedItem(stored.item, key, is_file=stored.is_file))
    inside = [
        place
        for place in placed
        if place.item.file in files
        and min(place.item.offset, place.item.length) >= 0
        and place.item.offset + place.item.length <= looked.sizes[place.item.file]
    ]
    return sorted(inside, key=lambda place: place.item)


def finding_of(folder: Place, error: CheckpointDamaged | CheckpointUnsafe) -> Finding:
    """Return what `error`, about the checkpoint in `folder`, says as a finding."""
    damage = damage_in(folder, error) if isinstance(error, CheckpointUnsafe) else error
    file, colon, text = damage.finding.partition(": ")
    described = (layout.MANIFEST, layout.METADATA, layout.DIGESTS)
    is_file = colon and (file in described or file.endswith((".safetensors", ".json")))
    return Finding(file, text, damage.keys) if is_file else Finding("", damage.finding, damage.keys)


def check_set_aside(aside: SetAside, advance: OnBytes) -> None:
    """Raise CheckpointDamaged unless `aside` is what was committed, so that it may have its place again.

    Every byte of a damaged one is read; of an abandoned one, in which nothing was ever wrong, the sizes of the files
    are compared: a load verifies it anyway. Calls `advance` with the bytes of each read. Raises `CheckpointUnreadable`,
    OSError.
    """
    looked = look_at(aside.folder)
    findings = looked.findings
    if not findings and aside.why == CORRUPT:
        bare = [name for name, record in looked.records.items() if record.size and not record.blocks]
        findings = tuple(Finding(name, f"there are no digests of it in {layout.MANIFEST}") for name in bare)
        findings = findings or read_through(looked, advance).findings
    for each in findings:
        raise CheckpointDamaged(str(aside.folder), f"{each.file}: {each.text}".removeprefix(": "), each.keys)
