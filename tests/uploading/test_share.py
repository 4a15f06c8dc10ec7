"""Each file is uploaded by one host."""

from __future__ import annotations

from torchtitan_lite.store import layout
from torchtitan_lite.uploading.choice import Share


def test_each_file_has_one_host() -> None:
    hosts = [77, 77, 5, 5, 9]
    shares = [Share.of(rank, hosts) for rank in (0, 2, 4)]
    assert [share.host for share in shares] == [0, 1, 2]
    names = [layout.data_file(rank, 0) for rank in range(7)] + [layout.record_file(3), layout.METADATA]
    assert [[share.has(name) for share in shares].index(True) for name in names] == [0, 0, 1, 1, 2, 0, 0, 1, 0]
    assert all(sum(share.has(name) for share in shares) == 1 for name in names)


def test_one_host_has_all_files() -> None:
    assert all(Share().has(name) for name in (layout.data_file(4, 0), layout.METADATA))
