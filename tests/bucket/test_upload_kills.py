"""An upload into an object store, killed before, during and after each of its requests."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from tests.bucket.proxy import FATES, Proxy, at, killing
from tests.bucket.stored_files import uploads_under_way, written
from tests.forked import Forked, run_script
from torchtitan_lite.bucket.bucket_store import open_bucket
from torchtitan_lite.bucket.object_upload import PART_BYTES
from torchtitan_lite.bucket.objects import connect
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.store import layout
from torchtitan_lite.store.place import ObjectPlace

SCRIPT = Path(__file__).with_name("uploading.py")


def start(source: Path, folder: str, proxy: Proxy, tmp_path: Path) -> Forked:
    environment = {**os.environ, **proxy.environment, "OMP_NUM_THREADS": "1"}
    return run_script(SCRIPT, [str(source), folder], tmp_path / "log", environment)


def assert_complete(source: Path, folder: str) -> list[int]:
    """Return the steps in the store, each of which has the files of the step on disk, byte for byte."""
    store, objects = open_bucket(folder), connect(parse_address(folder))
    for info in store.committed():
        assert isinstance(info.path, ObjectPlace)
        assert store.check_sizes(info) == []
        for path in (source / layout.step_dir(info.step)).glob("__*"):
            assert objects.get(f"{info.path.name}/{path.name}")[0] == path.read_bytes()
    return [info.step for info in store.committed()]


@pytest.mark.parametrize(
    "apart", [pytest.param(27, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("fate", FATES)
def test_killed_at_any_request_it_continues_and_leaves_nothing(
    proxy: Proxy, folder: str, fate: str, apart: int, tmp_path: Path
) -> None:
    template = tmp_path / "source"
    for step in (1, 2, 3):
        written(template, 2 * PART_BYTES + 7 if step == 3 else 1000, step)
    counted = shutil.copytree(template, tmp_path / "counted")
    proxy.again()
    assert start(counted, f"{folder}-counted", proxy, tmp_path).wait(60) == 0, (tmp_path / "log").read_text()
    count = len(proxy.log)
    assert count > 20
    for number in range(1 + FATES.index(fate), count + 1, apart):
        source, own = shutil.copytree(template, tmp_path / str(number)), f"{folder}-{number}"
        started: Future[int] = Future()
        proxy.again(at(number, killing(started, fate)))
        process = start(source, own, proxy, tmp_path)
        started.set_result(process.pid)
        process.wait(60)
        proxy.again()
        before = assert_complete(source, own)
        assert start(source, own, proxy, tmp_path).wait(60) == 0, (number, (tmp_path / "log").read_text())
        assert assert_complete(source, own) == [2, 3], number
        assert set(before) <= {2, 3}, number
        assert uploads_under_way(own) == [], number
        names = {each.key.partition("/")[0] for each in connect(parse_address(own)).list("step")}
        assert len(names) == 2, (number, names)
        shutil.rmtree(source)
