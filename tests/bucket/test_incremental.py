"""Incremental saves into an object store: the store itself copies what has not changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.frozen_run import STILL, FrozenRun
from tests.checkpoint.small_run import same
from torchtitan_lite.bucket import upload
from torchtitan_lite.bucket.obstore_objects import connect
from torchtitan_lite.bucket.store import open_bucket
from torchtitan_lite.config.address import parse


def linked(folder: str) -> list[int]:
    """Return for each step how many bytes its save did not send."""
    return [info.linked_bytes for info in open_bucket(folder).committed()]


def test_what_has_not_changed_is_copied_by_the_store_and_loads_bit_for_bit(folder: str, tmp_path: Path) -> None:
    with FrozenRun(tmp_path, folder=folder, async_mode="async") as run:
        run.manager.load()
        run.steps(2)
        with torch.no_grad():
            run.model.get_buffer("table")[3] += 1
        run.steps(3)
        wanted = run.contents()
    first, second, third, fourth, fifth = linked(folder)
    assert (first, third, fourth) == (0, 0, 0)
    assert second > fifth > 0
    objects, name = connect(parse(folder)), open_bucket(folder).get(4).path.name
    objects.delete([each.key for each in objects.list(f"{name}/")])
    with FrozenRun(tmp_path, folder=folder, async_mode="async") as again:
        assert again.manager.load()
        assert same(again.contents(), wanted)


def test_an_object_that_is_gone_is_uploaded(folder: str, tmp_path: Path) -> None:
    with FrozenRun(tmp_path, folder=folder) as run:
        run.manager.load()
        run.steps(1)
        connect(parse(folder)).delete([f"{open_bucket(folder).get(1).path.name}/{STILL}"])
        run.steps(1)
        assert linked(folder) == [0, 0]
        assert open_bucket(folder).check_sizes(open_bucket(folder).get(2)) == []


def test_what_is_too_large_for_one_copy_is_uploaded(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "MOST_COPIED_BYTES", 1 << 20)
    with FrozenRun(tmp_path, folder=folder) as run:
        run.manager.load()
        run.steps(2)
    assert linked(folder) == [0, 0]
