"""The files of a checkpoint in an object store, as a load asks for them."""

from __future__ import annotations

import os

import pytest

from tests.bucket import proxy as proxies
from tests.bucket.proxy import Proxy, where
from tests.store.filled import manifest_of
from torchtitan_lite.bucket.object_reader import ObjectFiles, files_at
from torchtitan_lite.bucket.objects import ObjectPath, Objects, connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.errors import CheckpointDamaged, CheckpointUnsafe
from torchtitan_lite.store.manifest import Manifest
from torchtitan_lite.store.place import ObjectPlace

NAME = "step-5.0123456789abcdef"
FILES = {"__0_0.distcp": b"of rank 0", "__1_0.distcp": b"rank 1", "empty": b""}


@pytest.fixture
def place(folder: str) -> ObjectPlace:
    objects = connect(parse_address(folder))
    for name, data in FILES.items():
        objects.put(f"{NAME}/{name}", data)
    objects.put(f"{NAME}0/other", b"of another checkpoint")
    return ObjectPlace(folder, NAME)


@pytest.fixture
def objects(place: ObjectPlace) -> Objects:
    return connect(parse_address(place.address))


def manifest() -> Manifest:
    records = {name: FileRecord.of(data) for name, data in FILES.items()}
    return manifest_of(5, world_size=2, files=records)


def test_the_manifest_is_read_if_there_is_one(place: ObjectPlace, objects: Objects) -> None:
    files = files_at(place)
    assert files.manifest() is None
    assert files.identity() is None
    objects.put(f"{NAME}/manifest.json", manifest().to_json())
    assert files.manifest() == manifest()
    identity = files.identity()
    assert identity is not None and identity == files_at(place).identity()
    objects.put(f"{NAME}/manifest.json", b"{}")
    assert files.identity() != identity
    with pytest.raises(CheckpointDamaged):
        files.manifest()


def test_sizes_are_those_of_the_files_that_exist(place: ObjectPlace) -> None:
    files = files_at(place)
    assert files.sizes_of([*FILES, "other", "missing"]) == {name: len(data) for name, data in FILES.items()}
    assert files.sizes_of(["empty"]) == {"empty": 0}
    assert files.sizes_of([]) == {}
    for name in ("../other", "", "a/b"):
        with pytest.raises(CheckpointUnsafe, match="is not the name of a file in it"):
            files.sizes_of([name])


def test_a_small_file_is_opened_and_read(place: ObjectPlace) -> None:
    files = files_at(place)
    with files.opened("__0_0.distcp") as fd:
        assert os.pread(fd, 100, 0) == FILES["__0_0.distcp"]
        assert os.read(fd, 2) == b"of"
    with pytest.raises(FileNotFoundError), files.opened("missing"):
        pass


def test_the_reader_reads_a_file_by_the_path_that_messages_show(place: ObjectPlace) -> None:
    files = files_at(place)
    path = files.path_of("__0_0.distcp")
    assert str(path) == f"{place}/__0_0.distcp"
    assert path.name == "__0_0.distcp"
    piece = Piece(3, memoryview(bytearray(4)))
    files.reader().read(path, FileRecord.of(FILES["__0_0.distcp"]), [piece])
    assert piece.into == b"rank"


def test_the_parts_of_all_ranks_are_all_names(place: ObjectPlace) -> None:
    names = [str(number) for number in range(10)]
    shares = [files_at(place).share(names, rank, 4) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == names


def test_a_store_that_refuses_has_no_identity_that_matches(proxy: Proxy, place: ObjectPlace) -> None:
    files = ObjectFiles(Objects(parse_address(place.address)), place)
    proxy.rules.append(where(proxies.answers(403, "AccessDenied")))
    assert files.identity() not in (None, ())
    with pytest.raises(PermissionError):
        files.manifest()
    with pytest.raises(PermissionError):
        files.sizes_of(["empty"])


def test_a_path_of_an_object_shows_its_address() -> None:
    path = ObjectPath("s3://bucket/run/step-5/file")
    assert str(path) == f"{path}" == "s3://bucket/run/step-5/file"
    assert str(path.with_name("other")) == "s3://bucket/run/step-5/other"
    assert str(path.parent) == "s3://bucket/run/step-5"
    assert path.match("*/file")
