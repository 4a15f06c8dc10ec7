"""Read a checkpoint's bytes into memory.

Each needed range is read once, in the order of the file, several at a time, directly into its tensor, and
verified in the same pass; what belongs on a GPU goes there while the next range is read. Nothing in a file makes code
run. `CheckpointReader` is a StorageReader: `dcp.load(state, storage_reader=CheckpointReader(folder))` reads our
checkpoints and plain DCP's. It takes at most 64 MiB, however large the state; only objects and tensors in an unusual
form are in memory twice.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from torchtitan_lite.checkpoint.devices.buffer_ring import DeviceRing
from torchtitan_lite.checkpoint.devices.link import CudaLink, Link
from torchtitan_lite.checkpoint.format.chunk_runs import is_inside, row_major_strides
from torchtitan_lite.checkpoint.format.contents import Chunk, Item
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES, to_metadata
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder, Verify
from torchtitan_lite.checkpoint.reading.regions import (
    BufferedPart,
    RankReads,
    Region,
    StoredBox,
    staged,
    straight,
    whole,
)
from torchtitan_lite.checkpoint.untrusted.safe_load import UnsafeItem, load_item
from torchtitan_lite.checkpoint.untrusted.stock_item import Layout, item_reader, locate
from torchtitan_lite.collection import no_collection
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import BLOCK_BYTES, DIGEST_BYTES
from torchtitan_lite.disk.read_requests import Piece, PieceTable, ReadsBlocks
from torchtitan_lite.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointUnsafe,
    reading,
)
from torchtitan_lite.store.place import Place

BATCH_BYTES = 24 << 20
"""Memory for the buffers that one batch of staged parts or objects is read into."""

T = TypeVar("T")


class CheckpointReader(StorageReader):
    """Reads the checkpoint in `folder`, a path or an open `CheckpointFolder`, with `blocks`.

    `make_link` returns the link to the devices whose tensors are read into.
    """

    def __init__(
        self,
        folder: CheckpointFolder | Path,
        verify: Verify = "full",
        blocks: ReadsBlocks | None = None,
        make_link: Callable[[], Link] | None = None,
    ) -> None:
        self._folder = folder if isinstance(folder, CheckpointFolder) else CheckpointFolder(folder, verify)
        self._blocks = blocks or self._folder.files.reader()
        self._make_link = make_link or CudaLink

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the constructor has the path."""

    def read_metadata(self) -> Metadata:
        # No **kwargs: if this takes any and fails, DCP calls it again with `rank=` for metadata of that rank.
        return to_metadata(self._folder.contents)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the folder knows the places."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan`."""
        self._read_items(plan.items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True  # The constructor has the path, and no id is read.

    def read(self, wanted: RankReads) -> None:
        """Fill every target and hand over every object. Any rank.

        Raises `CheckpointDamaged`, naming file, bytes and keys; `CheckpointUnsafe`; `CheckpointUnreadable`; and, before
        it reads anything, `CheckpointMismatch` for a region that is not inside its chunk.
        """
        with DeviceRing(self._make_link()) as ring:
            with no_collection():
                pieces, parts = self._sorted(wanted.regions, ring)
            ring.follow()
            for file in sorted({*pieces, *wanted.small}):
                self._fill(file, pieces.get(file, ()), wanted.small.get(file))
            for batch in _read_batches(
                sorted(parts, key=lambda part: (part.file, part.at)), lambda part: part.num_bytes
            ):
                for file, of_file in groupby(batch, key=lambda part: part.file):
                    self._read_staged(file, list(of_file), ring)
        self._read_objects(wanted.objects)

    def verify_rest(self, number: int, count: int) -> None:
        """Verify the blocks without tensors in the files that are the share of rank `number` of `count`. Any rank.

        Calls with each `number` below `count`, together with a read of all tensors, verify every byte.
        """
        records = self._folder.records
        for file in self._folder.files.share(sorted(records), number, count):
            blocks = self._blocks_without_tensors(file, len(records[file].blocks) // DIGEST_BYTES)
            if blocks:
                with _findings(self._folder, file):
                    self._blocks.verify(self._folder.files.path_of(file), records[file], blocks)

    def _sorted(self, regions: Sequence[Region], ring: DeviceRing) -> tuple[dict[str, list[Piece]], list[BufferedPart]]:
        """Split `regions` into pieces that are read directly into their place, by file, and staged parts."""
        tensors = self._folder.contents.tensors
        pieces: dict[str, list[Piece]] = {}
        others: list[Region] = []
        for region in regions:
            chunk = region.chunk
            if len(region.offsets) == len(chunk.sizes) and not any(region.offsets):
                piece = whole(chunk, tensors[region.key].dtype, region.target, ring)
                if piece is not None:
                    pieces.setdefault(chunk.file, []).append(piece)
                    continue
            if not is_inside(region.offsets, tuple(region.target.shape), chunk.sizes):
                box = f"{list(region.target.shape)} at {list(region.offsets)}"
                finding = f"  {region.key}: {box} is not inside a chunk of {list(chunk.sizes)}"
                raise CheckpointMismatch(str(self._folder.path), finding)
            others.append(region)
        parts: list[BufferedPart] = []
        for source, target in self._sources(others):
            direct = straight(source, target, ring)
            if direct is None:
                parts += staged(source, target, ring)
            else:
                pieces.setdefault(source.file, []).extend(direct)
        return pieces, parts

    def _read_items(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        """Read the items of a plan by one of DCP's own planners."""
        wanted = RankReads()
        committed: list[tuple[ReadItem, torch.Tensor]] = []
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                wanted.objects.append((item.storage_index.fqn, _handing_bytes_to(planner, item)))
                continue
            target = planner.resolve_tensor(item).detach()
            wanted.regions.append(
                Region(item.storage_index.fqn, self._chunk(item.storage_index), tuple(item.storage_offsets), target)
            )
            committed.append((item, target))
        self.read(wanted)
        for item, target in committed:
            planner.commit_tensor(item, target)

    def _chunk(self, index: MetadataIndex) -> Chunk:
        chunks = self._folder.contents.tensors[index.fqn].chunks
        offsets = tuple(index.offset or ())
        if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == offsets:
            return chunks[index.index]
        return next(chunk for chunk in chunks if chunk.offsets == offsets)

    def _sources(self, regions: Sequence[Region]) -> Iterator[tuple[StoredBox, torch.Tensor]]:
        """Yield the source and the target of each region. Reads items that can only be read as a whole."""
        tensors = self._folder.contents.tensors
        layouts = self._layouts({region.chunk.item for region in regions if region.chunk.item is not None})
        for region in regions:
            chunk, shape = region.chunk, tuple(region.target.shape)
            if 0 in shape:
                continue
            if chunk.at is not None:
                source = StoredBox(
                    chunk.file, chunk.at, tensors[region.key].dtype, chunk.sizes, row_major_strides(chunk.sizes)
                )
            else:
                assert chunk.item is not None
                layout = layouts[chunk.item]
                if layout is None:
                    self._read_whole(region, chunk.item)
                    continue
                if layout.shape != chunk.sizes:
                    raise _of_another_shape(self._folder.path, region, layout.shape)
                source = StoredBox(
                    chunk.file, chunk.item.offset + layout.at, layout.dtype, layout.shape, layout.strides
                )
            yield source.part(region.offsets, shape), region.target

    def _layouts(self, items: Iterable[Item]) -> dict[Item, Layout | None]:
        layouts: dict[Item, Layout | None] = {}
        for file, of_file in groupby(sorted(items), key=lambda item: item.file):
            with reading(self._folder.files.path_of(file)), self._folder.files.opened(file) as fd:
                for item in of_file:
                    layouts[item] = locate(item_reader(fd, item), item.length, DTYPES)
        return layouts

    def _read_whole(self, region: Region, item: Item) -> None:
        tensor = self._value(region.key, item, *self._bytes_of([item]))
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != region.chunk.sizes:
            raise _of_another_shape(self._folder.path, region, getattr(tensor, "shape", type(tensor).__name__))
        for dim, (offset, size) in enumerate(zip(region.offsets, region.target.shape, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        region.target.copy_(tensor)

    def _read_staged(self, file: str, parts: Sequence[BufferedPart], ring: DeviceRing) -> None:
        pieces = [piece for part in parts for piece in part.begin()]
        ring.follow()
        self._fill(file, pieces)
        ring.precede()
        for part in parts:
            part.finish()

    def _read_objects(self, objects: Sequence[tuple[str, Callable[[Any], None]]]) -> None:
        stored = self._folder.contents.objects
        items: list[tuple[Item, str, Callable[[Any], None]]] = []
        for key, take in objects:
            item = stored[key].item
            if item is None:
                take(stored[key].value)
            else:
                items.append((item, key, take))
        items.sort(key=lambda each: each[0])
        for batch in _read_batches(items, lambda each: each[0].length):
            for (item, key, take), data in zip(batch, self._bytes_of([item for item, _, _ in batch]), strict=True):
                take(self._value(key, item, data, is_typed=stored[key].is_typed))

    def _bytes_of(self, items: Sequence[Item]) -> list[bytearray]:
        """Return the bytes of each of `items`, which must be sorted."""
        data = [bytearray(item.length) for item in items]
        pieces = [(item.file, Piece(item.offset, memoryview(room))) for item, room in zip(items, data, strict=True)]
        for file, of_file in groupby(pieces, key=lambda piece: piece[0]):
            self._fill(file, [piece for _, piece in of_file])
        return data

    def _value(self, key: str, item: Item, data: bytearray, *, is_typed: bool = False) -> Any:
        try:
            return load_item(bytes(data), is_typed=is_typed)
        except UnsafeItem as error:
            raise CheckpointUnsafe(str(self._folder.path), f"{key} in {item.file}: {error}") from None

    def _fill(self, file: str, pieces: Sequence[Piece], table: PieceTable | None = None) -> None:
        with _findings(self._folder, file):
            self._blocks.read(self._folder.files.path_of(file), self._folder.records.get(file), pieces, table)

    def _blocks_without_tensors(self, file: str, num_blocks: int) -> list[int]:
        """Return those of the `num_blocks` blocks of `file` that hold no part of a tensor."""
        table = self._folder.contents.table
        extents = {
            (at // BLOCK_BYTES, (at + kind.nbytes - 1) // BLOCK_BYTES + 1)
            for kind, places in table.places_by_kind.items()
            if kind.file == file and kind.nbytes
            for at in places
        }
        for tensor in table.others.values():
            for chunk in tensor.chunks_in(file):
                _, begin, num_bytes = chunk.place(tensor.dtype.itemsize)
                if num_bytes:
                    extents.add((begin // BLOCK_BYTES, -(-(begin + num_bytes) // BLOCK_BYTES)))
        free = bytearray(b"\1") * num_blocks
        for first, end in extents:
            free[first:end] = bytes(end - first)
        return [block for block in range(num_blocks) if free[block]]


@contextmanager
def _findings(folder: CheckpointFolder, file: str) -> Iterator[None]:
    """Raise damage that the block finds in `file` as `CheckpointDamaged`, with the keys that it affects."""
    try:
        yield
    except DamagedRange as error:
        finding = f"bytes {error.begin} to {error.end} of {file}: {error.finding}"
        keys = folder.contents.keys_in(file, error.begin, error.end)
        raise CheckpointDamaged(str(folder.path), finding, keys) from None


def _handing_bytes_to(planner: LoadPlanner, item: ReadItem) -> Callable[[Any], None]:
    """Return a function that gives `planner` an object as a pickle of our own, because DCP's planners unpickle it."""

    def take(value: Any) -> None:
        data = io.BytesIO()
        torch.save(value, data)
        data.seek(0)
        planner.load_bytes(item, data)

    return take


def _of_another_shape(path: Place, region: Region, found: Any) -> CheckpointDamaged:
    finding = f"{region.key}: the metadata says {list(region.chunk.sizes)}, its item {found}"
    return CheckpointDamaged(str(path), finding, [region.key])


def _read_batches(parts: Sequence[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield `parts` in lists of at most `BATCH_BYTES` each, or of one larger part."""
    batch: list[T] = []
    taken = 0
    for part in parts:
        if batch and taken + num_bytes(part) > BATCH_BYTES:
            yield batch
            batch, taken = [], 0
        batch.append(part)
        taken += num_bytes(part)
    if batch:
        yield batch
