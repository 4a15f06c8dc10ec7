"""Checkpoints made to do harm: no code in them runs, no file outside is opened, nothing large is allocated."""

from __future__ import annotations

import functools
import io
import os
import pickle
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.checkpoint.with_manifest import add_manifest, write_manifest
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged, CheckpointError, CheckpointUnsafe

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = "__0_0.distcp"
OUTSIDE = "outside.distcp"

_opened: list[str] | None = None


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open":
        _opened.append(os.fspath(args[0]) if isinstance(args[0], str | Path) else str(args[0]))


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def nothing_happens(tmp_path: Path) -> Iterator[None]:
    """Put a file outside the checkpoint, and check after the test that no code in the checkpoint made the canary."""
    global _opened
    (tmp_path / OUTSIDE).write_bytes(bytes(100_000))
    yield
    _opened = None
    tracemalloc.stop()
    assert not canary(tmp_path).exists()


def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a checkpoint of one tensor and one object with plain DCP."""
    dcp_save({"model": {"w": torch.ones(8, 4)}, "s": {"n": 7}}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def refused(folder: Path, kind: type[CheckpointError], match: str) -> None:
    """Check that reading all of the checkpoint raises exactly `kind`, opens nothing outside and takes little memory."""
    global _opened
    _opened = []
    tracemalloc.start()
    live = torch.zeros(8, 4)
    with pytest.raises(kind, match=match) as caught:
        checkpoint = StoredCheckpoint(folder, Peers(timedelta(seconds=60)))
        checkpoint.read_state("s", {})
        checkpoint.read_model({"w": live})
    assert type(caught.value) is kind
    assert str(folder) in str(caught.value)
    assert not live.any()
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    opened, _opened = _opened, None
    assert not [path for path in opened if OUTSIDE in path]


class Calls:
    """An object whose pickle is a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def touch(tmp_path: Path) -> str:
    return f"touch {canary(tmp_path)}"


def python(tmp_path: Path) -> str:
    return f"open({str(canary(tmp_path))!r}, 'w')"


CALLS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda at: Calls(os.system, touch(at)),
    "eval": lambda at: Calls(eval, python(at)),
    "exec": lambda at: Calls(exec, python(at)),
    "getattr": lambda at: Calls(getattr, torch.Size, "__reduce__"),
    "torch.load": lambda at: Calls(torch.load, str(at / OUTSIDE)),
    "partial": lambda at: Calls(functools.partial, os.system, touch(at)),
    "nested": lambda at: {"a": [Calls(torch.Size, [Calls(os.system, touch(at))])]},
    "open": lambda at: Calls(open, str(canary(at)), "w"),
}


@pytest.mark.promise("Nothing in a hostile checkpoint is run.", section="hostile")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_in_the_metadata_is_not_made(
    folder: Path, tmp_path: Path, call: Callable[[Path], Any], protocol: int
) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(call(tmp_path), protocol))
    refused(folder, CheckpointUnsafe, "which no checkpoint needs|is one that no checkpoint needs")


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("field", ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"])
def test_a_call_within_the_metadata_is_not_made(
    folder: Path, tmp_path: Path, call: Callable[[Path], Any], field: str
) -> None:
    metadata: Any = FileSystemReader(folder).read_metadata()
    setattr(metadata, field, call(tmp_path))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refused(folder, CheckpointUnsafe, "which no checkpoint needs")


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


SIZE = named("torch", "Size")
META = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    "pickled",
    [
        named("torch", "Size.__reduce__") + b".",
        named(META, "Metadata.__init__.__globals__") + b".",
        b"ctorch\nSize.__reduce__\n.",
        named("torch", "float32") + b")R.",
        SIZE + b"}" + text("__reduce__") + text("x") + b"sb.",
        named(META, "Metadata") + b")\x81}" + text("__class__") + SIZE + b"sb.",
        named(META, "Metadata") + b"}" + text("__init__") + named("os", "system") + b"sb.",
        named(META, "Metadata") + b")\x81N\x86b.",
        b"]\x94h\x00a.",
        b"Nr\xff\xff\xff\x7f.",
        b"N" + b"p2147483647\n.",
        b"X\xff\xff\xff\x7fabc.",
        b"\x8d" + struct.pack("<Q", 1 << 60) + b".",
        b"\x8e" + struct.pack("<Q", 1 << 60) + b".",
        b"\x96" + struct.pack("<Q", 1 << 60) + b".",
        b"\x95" + struct.pack("<Q", 1 << 60) + b"N.",
        b"}" + b")" + b"\x85" * 200_000 + b"Ns.",
        b"}" + b")" + b"\x94h\x00\x86\x94h\x01\x86" * 20 + b"Ns.",
        b")" + b"\x85" * 200_000 + b".",
        b"\x82\x01.",
        b"(i" + b"os\nsystem\n.",
        b"(S'x'\nios\nsystem\n.",
        b"\x8b\xff\xff\xff\x7f.",
        b"",
        b".",
        b"N",
        b"NN.",
        b"not a pickle",
        b"\x00" * 100,
    ],
    ids=lambda data: repr(data[:30]),
)
def test_a_pickle_that_is_not_metadata_is_refused(folder: Path, pickled: bytes) -> None:
    for head in (b"", b"\x80\x04"):
        (folder / ".metadata").write_bytes(head + pickled)
        refused(folder, CheckpointUnsafe, "not metadata as DCP writes it")


@pytest.mark.parametrize("cut", range(0, 900, 37))
def test_metadata_cut_short_is_refused(folder: Path, cut: int) -> None:
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[:cut])
    refused(folder, CheckpointUnsafe, "not metadata as DCP writes it")


@pytest.mark.promise("Nothing in a hostile checkpoint is run.", section="hostile")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("ours", [False, True])
def test_a_call_in_an_object_is_not_made(tmp_path: Path, call: Callable[[Path], Any], ours: bool) -> None:
    state = {"model": {"w": torch.ones(8, 4)}, "s": {"evil": "here"}}
    folder = tmp_path / "c"
    dcp_save(state, checkpoint_id=folder, no_dist=True)
    item = io.BytesIO()
    torch.save(call(tmp_path), item)
    put_object(folder, "s.evil", item.getvalue(), ours=ours)
    refused(folder, CheckpointUnsafe, r"s\.evil in __0_0\.distcp")


def put_object(folder: Path, key: str, item: bytes, *, ours: bool) -> None:
    """Make `item` the stored object `key`; `ours`: with a manifest that says so."""
    change_places(folder, {key: (DATA, append(folder / DATA, item), len(item))})
    if ours:
        where = {key: {"path": [key], "item": [DATA, (folder / DATA).stat().st_size - len(item), len(item)]}}
        files = {name: (folder / name).read_bytes() for name in (DATA, ".metadata")}
        write_manifest(folder, files, {}, where)


def append(path: Path, data: bytes) -> int:
    """Append `data` to the file `path`, and return the byte where it starts."""
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(data)
    return size


def change_places(folder: Path, places: dict[str, tuple[str, int, int]]) -> None:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn in places:
                info.relative_path, info.offset, info.length = places[index.fqn]

    change_metadata(folder, change)


def change_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = FileSystemReader(folder).read_metadata()
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def bomb(*, compressed: bool) -> bytes:
    """Return a small archive, as torch.save makes it, that would load to something very large."""
    item = io.BytesIO()
    torch.save(Calls(bytearray, 1 << 40), item)
    if not compressed:
        return item.getvalue()
    item = io.BytesIO()
    torch.save({"x": torch.zeros(50 << 20, dtype=torch.uint8)}, item)
    small = io.BytesIO()
    with zipfile.ZipFile(item) as source, zipfile.ZipFile(small, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in source.infolist():
            archive.writestr(entry.filename, source.read(entry))
    return small.getvalue()


@pytest.mark.promise("A hostile checkpoint creates no object larger than its files.", section="hostile")
@pytest.mark.parametrize("compressed", [False, True])
def test_a_small_item_that_makes_a_large_object_is_refused(folder: Path, compressed: bool) -> None:
    put_object(folder, "s.n", bomb(compressed=compressed), ours=False)
    refused(folder, CheckpointUnsafe, r"s\.n in .*: (an entry is compressed|it allocates a .* of any size)")


@pytest.mark.promise("Nothing outside the folder of a hostile checkpoint is read or written.", section="hostile")
@pytest.mark.parametrize("name", [f"../{OUTSIDE}", f"sub/../../{OUTSIDE}", "..", "", ".", "a\0b", "ABSOLUTE"])
@pytest.mark.parametrize("key", ["model.w", "s.n"])
def test_a_name_in_the_metadata_that_leads_out_is_not_followed(folder: Path, name: str, key: str) -> None:
    name = str(folder.parent / OUTSIDE) if name == "ABSOLUTE" else name
    change_places(folder, {key: (name, 0, 1000)})
    refused(folder, CheckpointUnsafe, "is not the name of a file in it")


def tensor(chunks: list[Any], shape: tuple[int, ...] = (8, 4)) -> dict[str, Any]:
    return {"model.w": {"dtype": "float32", "shape": list(shape), "path": ["model", "w"], "chunks": chunks}}


OBJECT = {"s.n": {"path": ["s", "n"], "value": 7}}


def with_table(folder: Path, tensors: dict[str, Any], objects: dict[str, Any] = OBJECT) -> None:
    files = {name: (folder / name).read_bytes() for name in (DATA, ".metadata")}
    write_manifest(folder, files, tensors, objects)


@pytest.mark.promise("Nothing outside the folder of a hostile checkpoint is read or written.", section="hostile")
@pytest.mark.parametrize("name", [f"../{OUTSIDE}", "..", "", "a\0b", "a\\b", "ABSOLUTE"])
def test_a_name_in_the_manifest_that_leads_out_is_not_followed(folder: Path, name: str) -> None:
    name = str(folder.parent / OUTSIDE) if name == "ABSOLUTE" else name
    with_table(folder, tensor([[name, 0, [0, 0], [8, 4]]]))
    refused(folder, CheckpointUnsafe, "is not the name of a file in it")
    with_table(folder, tensor([[DATA, 0, [0, 0], [8, 4]]]), {"s.n": {"path": ["s", "n"], "item": [name, 0, 10]}})
    refused(folder, CheckpointUnsafe, "is not the name of a file in it")


@pytest.mark.promise("Nothing outside the folder of a hostile checkpoint is read or written.", section="hostile")
@pytest.mark.parametrize("name", [DATA, ".metadata", "manifest.json"])
@pytest.mark.parametrize("what", ["link", "dangling link", "pipe", "folder", "device"])
def test_a_link_pipe_or_folder_in_place_of_a_file_is_refused_without_waiting(
    folder: Path, name: str, what: str
) -> None:
    if name != ".metadata":
        add_manifest(folder)
    path, outside = folder / name, folder.parent / OUTSIDE
    outside.write_bytes(path.read_bytes())
    path.unlink()
    if what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": str(outside), "dangling link": "nowhere", "device": "/dev/zero"}[what])
    refused(folder, CheckpointUnsafe, rf"{name} is not read: expected a file, found a (symbolic link|pipe|folder)")


HUGE = 1 << 60
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "absurdly large": (tensor([[DATA, 0, [0], [2 * HUGE]]], (2 * HUGE,)), "its shape is not possible"),
    "very large": (tensor([[DATA, 0, [0], [HUGE]]], (HUGE,)), r"model\.w is in bytes 0 to"),
    "larger than the file": (tensor([[DATA, 0, [0], [1 << 40]]], (1 << 40,)), r"model\.w is in bytes 0 to"),
    "with strides too large": (tensor([], (HUGE, HUGE, 0)), "its shape is not possible"),
    "of negative size": (tensor([[DATA, 0, [0, 0], [-8, -4]]], (-8, -4)), "its shape is not possible"),
    "beyond the file": (tensor([[DATA, 1 << 50, [0, 0], [8, 4]]]), "is in bytes"),
    "before the file": (tensor([[DATA, -1, [0, 0], [8, 4]]]), "is in bytes -1"),
    "half covered": (tensor([[DATA, 0, [0, 0], [4, 4]]]), "16 elements where there are 32"),
    "not covered": (tensor([]), "0 elements where there are 32"),
    "doubly covered": (tensor([[DATA, 0, [0, 0], [8, 4]]] * 2), "64 elements where there are 32"),
    "half covered twice": (tensor([[DATA, 0, [0, 0], [4, 4]]] * 2), "overlap"),
    "covered beyond its end": (tensor([[DATA, 0, [4, 0], [8, 4]]]), "outside of it"),
    "of a negative offset": (tensor([[DATA, 0, [-1, 0], [8, 4]]]), "negative"),
    "of other dimensions": (tensor([[DATA, 0, [0], [32]]]), "number of dimensions"),
    "in a file that is not there": (tensor([["__1_0.distcp", 0, [0, 0], [8, 4]]]), "__1_0.distcp is missing"),
    "of no dtype": ({"model.w": tensor([])["model.w"] | {"dtype": "load"}}, "name of a dtype"),
    "of a true shape": ({"model.w": tensor([])["model.w"] | {"shape": [True, 4]}}, "whole numbers"),
    "of a shape in words": ({"model.w": tensor([])["model.w"] | {"shape": "84"}}, "expected a list"),
    "of no chunks": ({"model.w": {"dtype": "float32", "shape": [], "path": []}}, "chunks"),
    "all in the same bytes": (
        {f"model.{i}": tensor([[DATA, 0, [0, 0], [8, 4]]])["model.w"] for i in range(100)},
        "cannot be in files",
    ),
}


def test_a_size_that_is_true_is_damage_also_after_one_that_is_1(folder: Path) -> None:
    for shape, match in (([1, 4], "elements"), ([True, 4], "whole numbers")):
        with_table(folder, {"model.w": tensor([])["model.w"] | {"shape": shape}})
        refused(folder, CheckpointDamaged, match)


@pytest.mark.promise("A hostile checkpoint creates no object larger than its files.", section="hostile")
@pytest.mark.parametrize(("tensors", "match"), MISFITS.values(), ids=MISFITS)
def test_a_tensor_in_the_manifest_that_cannot_be_is_damage(folder: Path, tensors: dict[str, Any], match: str) -> None:
    with_table(folder, tensors)
    refused(folder, CheckpointDamaged, match)


@pytest.mark.parametrize(
    "entry",
    [{"path": ["s"]}, {"path": ["s"], "value": {"$eval": "1"}}, {"path": [["s"]], "value": 1}, {"path": [], "item": 3}],
    ids=repr,
)
def test_an_object_in_the_manifest_that_cannot_be_is_damage(folder: Path, entry: dict[str, Any]) -> None:
    with_table(folder, tensor([[DATA, 0, [0, 0], [8, 4]]]), {"s.n": entry})
    refused(folder, CheckpointDamaged, r"entry of s\.n")


def absurd(metadata: Any) -> None:
    described = metadata.state_dict_metadata["model.w"]
    described.size = described.chunks[0].sizes = torch.Size([HUGE, 2])


def twice(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].chunks *= 2


def half(metadata: Any) -> None:
    metadata.state_dict_metadata["model.w"].chunks[0].sizes = torch.Size([4, 4])


def beyond(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 50


@pytest.mark.parametrize("change", [absurd, twice, half, beyond])
def test_a_tensor_in_the_metadata_that_cannot_be_is_damage(folder: Path, change: Callable[[Any], None]) -> None:
    change_metadata(folder, change)
    refused(folder, CheckpointDamaged, "elements where there are|its shape is not possible|is in bytes")


def test_a_list_of_chunks_that_a_thousand_tensors_share_is_refused(folder: Path) -> None:
    """A pickle can refer to the same list a thousand times."""

    def change(metadata: Any) -> None:
        shared = metadata.state_dict_metadata["model.w"]
        metadata.state_dict_metadata |= {f"model.w{i}": shared for i in range(1000)}

    change_metadata(folder, change)
    refused(folder, CheckpointUnsafe, "it has no place for a chunk")


def test_an_item_of_another_shape_than_the_metadata_says_is_damage(folder: Path) -> None:
    def change(metadata: Any) -> None:
        described = metadata.state_dict_metadata["model.w"]
        described.size = described.chunks[0].sizes = torch.Size([4, 8])

    change_metadata(folder, change)
    live = {"w": torch.zeros(4, 8)}
    with pytest.raises(CheckpointDamaged, match=r"model\.w: the metadata says \[4, 8\], its item \(8, 4\)"):
        StoredCheckpoint(folder, Peers(timedelta(seconds=60))).read_model(live)


def test_metadata_of_an_endless_file_is_not_read(folder: Path) -> None:
    os.truncate(folder / ".metadata", 1 << 40)
    refused(folder, CheckpointUnsafe, "expected at most")
