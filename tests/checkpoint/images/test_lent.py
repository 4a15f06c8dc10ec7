"""What a rank verifies of the images on its host, and what it lends to ranks on others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import pytest

from tests.checkpoint.images.image_runs import start
from tests.store.filled import manifest_of
from torchtitan_lite.checkpoint.reading.source import LoadSource
from torchtitan_lite.disk.block_reader import DamagedRange
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.disk.read_requests import Piece
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.memory.images import image_sources
from torchtitan_lite.memory.images.held_images import Complete, HeldImages
from torchtitan_lite.memory.images.image_sources import lent_parts, verify_images
from torchtitan_lite.memory.images.mapped_reader import FilesInMemory
from torchtitan_lite.memory.keeper.client import Keeper
from torchtitan_lite.store.lineage import Lineage

DATA = {f"__{rank}_0.distcp": bytes([rank]) * (2_100_000 + rank) for rank in range(3)}
FIRST, SECOND, THIRD = DATA


@pytest.fixture
def images() -> Iterator[Mapping[str, int]]:
    """The first two files in memory."""
    found = {name: os.memfd_create(name) for name in (FIRST, SECOND)}
    for name, fd in found.items():
        os.ftruncate(fd, 3 << 20)
        os.pwrite(fd, DATA[name], 0)
    yield found
    for fd in found.values():
        os.close(fd)


def files_in(images: Mapping[str, int], own: str | None = None) -> FilesInMemory:
    files = {name: FileRecord.of(data) for name, data in DATA.items()}
    return FilesInMemory(manifest_of(7, world_size=3, files=files, lineage=Lineage("r1")), images, own)


def spoil(fd: int, at: int) -> None:
    (byte,) = os.pread(fd, 1, at)
    os.pwrite(fd, bytes([byte ^ 1]), at)


def test_closed_files_are_no_longer_mapped() -> None:
    fd = os.memfd_create("lent-once")
    os.pwrite(fd, DATA[FIRST], 0)
    files = files_in({FIRST: fd})
    files.reader().verify(Path(FIRST), FileRecord.of(DATA[FIRST]), [0])
    assert "memfd:lent-once" in Path("/proc/self/maps").read_text()
    for _ in range(2):
        files.close()
        assert "memfd:lent-once" not in Path("/proc/self/maps").read_text()
    os.close(fd)


@pytest.mark.parametrize("own", [None, SECOND])
def test_every_block_of_the_share_of_a_rank_is_verified(images: Mapping[str, int], own: str | None) -> None:
    files = files_in(images, own)
    number, count = (1, 3) if own is None else (0, 1)
    files.verify(number, count)
    for at in (0, 1 << 20, len(DATA[SECOND]) - 1):
        spoil(images[SECOND], at)
        with pytest.raises(DamagedRange) as damage:
            files.verify(number, count)
        assert damage.value.begin <= at < damage.value.end
        spoil(images[SECOND], at)
    spoil(images[FIRST], 0)
    files.verify(number, count)
    files.close()


def test_a_share_is_every_nth_file_or_the_own_one_of_a_spread_image(images: Mapping[str, int]) -> None:
    names = sorted(DATA)
    assert [files_in(images).share(names, number, 2) for number in (0, 1)] == [[FIRST, THIRD], [SECOND]]
    assert files_in(images, SECOND).share(names, 0, 2) == [SECOND]
    assert files_in(images, "").share(names, 0, 2) == []
    assert files_in(images).manifest() is not None


def test_a_rank_lends_only_verified_parts_of_its_own_file(images: Mapping[str, int]) -> None:
    ranges = {SECOND: [(0, 3), (2_099_999, 2)], FIRST: [(0, 1)]}
    files = files_in(images, SECOND)
    assert files.lend(ranges) == {SECOND: {0: b"\1\1\1", 2_099_999: b"\1\1"}}
    assert files.lend({FIRST: [(0, 1)]}) == {}
    for without in (files_in(images), files_in(images, "")):
        assert without.lend(ranges) == {}
    spoil(images[SECOND], 100)
    with pytest.raises(DamagedRange):
        files.lend(ranges)
    files.close()


def test_what_is_lent_of_another_host_is_read_and_nothing_else_of_it(images: Mapping[str, int]) -> None:
    files = files_in(images, SECOND)
    into = bytearray(3)
    files.borrow([{}, {SECOND: {0: b"own"}}, {THIRD: {5: b"abc"}}])
    reader, record = files.reader(), FileRecord.of(DATA[THIRD])
    reader.read(Path(THIRD), record, [Piece(5, memoryview(into))])
    assert into == b"abc"
    reader.read(Path(SECOND), FileRecord.of(DATA[SECOND]), [Piece(0, memoryview(into))])
    assert into == b"\1\1\1", "what is on this host is read here"
    with pytest.raises(DamagedRange, match="memory of another host"):
        reader.read(Path(THIRD), record, [Piece(6, memoryview(into))])
    files.close()


@pytest.fixture
def held(tmp_path: Path, memory_tier: Path) -> Iterator[HeldImages]:
    """The images of a small run that has ended."""
    start(tmp_path, 2).manager.close()
    found = HeldImages(Keeper(tmp_path / "checkpoint", 600.0, runtime=memory_tier), "now", Peers(timedelta(seconds=60)))
    found.look(topology="")
    yield found
    found.close()


def test_all_small_tensors_and_objects_of_the_own_file_are_lent_verified(
    held: HeldImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    each = held.complete[0]
    source = _source(each)
    files = held.files(each.image.key, each.manifest, is_spread=True)
    ((name, parts),) = lent_parts(source, files).items()
    sizes = sorted(map(len, parts.values()))
    with files.opened(name) as fd:
        assert all(os.pread(fd, len(part), at) == part for at, part in parts.items())
    tensors = [entry for entry in each.manifest.tensors.values() if 0 not in entry["shape"]]
    assert len(parts) >= len(tensors)

    page = (Path(__file__).parents[3] / "docs" / "where_a_step_can_be.md").read_text()
    assert f"if they have at most {image_sources.MOST_BYTES >> 20} MiB each" in page
    assert f"or more than {image_sources.MOST_BYTES_OF_A_RANK >> 20} MiB of small tensors" in page
    monkeypatch.setattr(image_sources, "MOST_BYTES_OF_A_RANK", sum(sizes))
    assert lent_parts(source, files) == {name: parts}
    monkeypatch.setattr(image_sources, "MOST_BYTES_OF_A_RANK", sum(sizes) - 1)
    assert lent_parts(source, files) == {}, "a rank with more lends nothing"
    monkeypatch.undo()
    for most in sorted({size - less for size in sizes for less in (0, 1)}):
        monkeypatch.setattr(image_sources, "MOST_BYTES", most)
        lent = lent_parts(source, files).get(name, {})
        assert lent == {at: part for at, part in parts.items() if len(part) <= most}
    files.close()


def test_damage_of_an_image_is_damage_of_its_source_with_the_place(held: HeldImages) -> None:
    each = held.complete[0]
    source = _source(each)
    files = held.files(each.image.key, each.manifest, is_spread=True)
    verify_images(source, files, 0, 1)
    ((name, parts),) = lent_parts(source, files).items()
    with files.opened(name) as fd:
        spoil(fd, min(parts))
    for act in (lambda: verify_images(source, files, 0, 1), lambda: lent_parts(source, files)):
        with pytest.raises(CheckpointDamaged, match=rf"step-2.*\n?.*bytes 0 to \d+ of {name}: "):
            act()
    files.close()


def _source(each: Complete) -> LoadSource:
    return LoadSource(Path("step-2"), each.image.key.step, model_only=False, lineage=each.manifest.lineage)
