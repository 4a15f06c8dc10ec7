"""Uploads from a disk into an object store: cut, refused, hanging, and what a start finds there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bucket.proxy import Proxy, answers, hangs, where
from tests.bucket.stored_files import uploads_under_way, written
from tests.checkpoint.small_run import SmallRun, same
from tests.ranks import Ranks
from torchtitan_lite.bucket.bucket_store import open_bucket
from torchtitan_lite.bucket.object_upload import PART_BYTES
from torchtitan_lite.bucket.objects import connect
from torchtitan_lite.bucket.s3_parts import AT_A_TIME, s3_parts_at
from torchtitan_lite.config.address import parse_address
from torchtitan_lite.store import layout
from torchtitan_lite.uploading import record
from torchtitan_lite.uploading.uploader import UploadJob, upload_all
from torchtitan_lite.uploads import Uploads

ROOT = Path(__file__).parents[2]
CUT = """
import os, sys
from torchtitan_lite.uploading.uploader import UploadJob, upload_all
def report(state):
    if state.sent_bytes >= int(sys.argv[3]):
        os._exit(9)
upload_all(UploadJob(sys.argv[1], sys.argv[2]), report)
"""


class Sent:
    """The bytes of all bodies that the proxy was sent."""

    def __init__(self, proxy: Proxy) -> None:
        self.num_bytes = 0
        proxy.rules.insert(0, self._count)

    def _count(self, request: Any) -> None:
        self.num_bytes += int(request.headers.get("content-length", 0)) if request.method == "PUT" else 0


def cut(source: Path, folder: str, after_bytes: int) -> None:
    """Upload in a process that ends like a killed one once it has read `after_bytes`."""
    command = [sys.executable, "-c", CUT, str(source), folder, str(after_bytes)]
    assert subprocess.run(command, cwd=ROOT, check=False, timeout=120).returncode == 9


def steps_in(folder: str) -> list[int]:
    return [info.step for info in open_bucket(folder).committed()]


@pytest.mark.slow
def test_a_cut_upload_sends_no_part_twice_but_those_under_way(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    size = 6 * PART_BYTES + 5
    source = written(tmp_path / "run", size).root
    cut(source, folder, 5 * PART_BYTES)
    assert steps_in(folder) == []
    assert record.read(source, folder).begun is not None
    assert [key.rpartition("/")[2] for key in uploads_under_way(folder)] == [layout.data_file(0, 0)]
    sent = Sent(proxy)
    assert upload_all(UploadJob(str(source), folder), lambda state: None) == 1
    # Four were read before the end, and three of these may have been under way.
    assert sent.num_bytes <= size - (4 - AT_A_TIME) * PART_BYTES + 100_000
    objects = connect(parse_address(folder))
    name = open_bucket(folder).committed()[0].path.name
    assert (
        objects.get(f"{name}/{layout.data_file(0, 0)}")[0] == (source / "step-1" / layout.data_file(0, 0)).read_bytes()
    )


@pytest.mark.exhaustive
def test_a_gigabyte_that_is_cut_five_times_costs_a_fifth_more_at_most(
    folder: str, proxy: Proxy, tmp_path: Path
) -> None:
    size = 1 << 30
    source, sent = written(tmp_path / "run", size).root, Sent(proxy)
    for _ in range(5):
        cut(source, folder, size // 6)
    assert upload_all(UploadJob(str(source), folder), lambda state: None) == 1
    assert sent.num_bytes <= 1.2 * size


@pytest.mark.slow
def test_an_upload_that_the_store_has_forgotten_begins_again(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    source = written(tmp_path / "run", 3 * PART_BYTES).root
    cut(source, folder, 2 * PART_BYTES)
    parts = s3_parts_at(folder)
    assert parts is not None
    parts.remove_all_but("")
    assert upload_all(UploadJob(str(source), folder), lambda state: None) == 1
    assert steps_in(folder) == [1]


@pytest.mark.slow
def test_parts_of_a_step_that_is_gone_are_removed_by_the_next_start(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    source = written(tmp_path / "run", 3 * PART_BYTES)
    cut(source.root, folder, 2 * PART_BYTES)
    source.empty(source.discard(source.get(1)))
    written(tmp_path / "run", 100, step=2)
    assert upload_all(UploadJob(str(source.root), folder), lambda state: None) == 1
    upload_all(UploadJob(str(source.root), folder), lambda state: None)
    assert uploads_under_way(folder) == []
    keys = {each.key.partition("/")[0] for each in connect(parse_address(folder)).list("step")}
    assert len(keys) == 1


@pytest.mark.slow
def test_an_upload_of_which_another_host_sent_files_continues(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    source = written(tmp_path / "run", 3 * PART_BYTES).root
    cut(source, folder, 2 * PART_BYTES)
    begun, name = record.read(source, folder).begun, layout.data_file(1, 0)
    assert begun is not None
    # As versions before did, in which each host sent the files of its ranks.
    connect(parse_address(folder)).put(f"{begun.place}/{name}", b"small")
    proxy.again()
    assert upload_all(UploadJob(str(source), folder), lambda state: None) == 1
    assert not [entry for entry in proxy.log if entry.method == "PUT" and entry.path.endswith(name)]
    assert steps_in(folder) == [1]
    assert uploads_under_way(folder) == []


def run_of(folder: Path, address: str, **config: Any) -> SmallRun:
    return SmallRun(folder, interval=1, upload_folder=address, **config)


@pytest.mark.slow
def test_a_lost_disk_costs_nothing_that_is_in_the_store(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    with run_of(tmp_path / "run", folder, keep_latest_k=2).loaded() as run:
        run.train(3)
        expected = run.contents()
    assert steps_in(folder) == [2, 3]
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", folder, keep_latest_k=2).resumed() as run:
        assert same(run.contents(), expected)
        run.train(5)
    assert steps_in(folder) == [4, 5]


@pytest.mark.slow
def test_a_disk_that_is_lost_during_an_upload_costs_that_step(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    with run_of(tmp_path / "run", folder).loaded() as run:
        run.train(2)
        expected = run.contents()
    with pytest.raises(ZeroDivisionError), run_of(tmp_path / "run", folder, upload_max_mb_per_second=1e-3) as run:
        run.manager.load()
        run.step()
        while not any(each.size for each in connect(parse_address(folder)).list("step-3.")):
            pass  # The first file of it is on its way.
        raise ZeroDivisionError
    shutil.rmtree(tmp_path / "run")
    with run_of(tmp_path / "run", folder).loaded() as run:
        assert same(run.contents(), expected)
        run.train(4)
    assert steps_in(folder) == [1, 2, 3, 4]


def load_and_train(rank: int, dump_folder: Path, address: str, environment: dict[str, str], steps: int) -> Any:
    """Load, train to `steps`; return the step that was loaded, its origin, whether the rank uploads, and the losses."""
    os.environ.update(environment)
    with run_of(dump_folder, address).loaded() as run:
        loaded = run.train_state.step
        origin = run.events.figures("loaded")["origin"] if loaded else ""
        run.train(steps)
        uploads = any(isinstance(each, Uploads) and each._process is not None for each in run.manager._companions)
        return loaded, origin, uploads, run.losses


@pytest.mark.slow
def test_ranks_load_together_what_their_disk_lost(two_ranks: Ranks, folder: str, proxy: Proxy, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"address": folder, "environment": proxy.environment}
    straight = two_ranks.run(load_and_train, dump_folder=tmp_path / "s", steps=4, **arguments | {"address": ""})
    assert two_ranks.run(load_and_train, dump_folder=tmp_path / "run", steps=2, **arguments)[0][0] == 0
    shutil.rmtree(tmp_path / "run")
    ended = two_ranks.run(load_and_train, dump_folder=tmp_path / "run", steps=4, **arguments)
    assert [each[:3] for each in ended] == [(2, "upload_folder", True), (2, "upload_folder", False)]
    assert [each[3] for each in ended] == [each[3] for each in straight]


@pytest.mark.slow
def test_a_store_that_hangs_costs_no_step_and_no_save(folder: str, proxy: Proxy, tmp_path: Path) -> None:
    with run_of(tmp_path / "run", folder, timeout_seconds=5).loaded() as run:
        run.step()
        proxy.again(where(hangs))
        run.train(4)
        assert run.committed() == [1, 2, 3, 4]
    proxy.again()
    run = run_of(tmp_path / "run", folder).loaded().finished(5)
    assert steps_in(folder) == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said_of_it"),
    [
        ("AccessDenied", "have no permission"),
        pytest.param("RequestTimeTooSkewed", "set this host's clock", marks=pytest.mark.slow),
    ],
)
def test_what_the_store_refuses_is_one_sentence_and_the_saves_continue(
    code: str, said_of_it: str, folder: str, proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with run_of(tmp_path / "run", folder, timeout_seconds=3).loaded() as run:
        proxy.again(where(answers(403, code), method="P*"))
        run.train(3)
        assert run.committed() == [1, 2, 3]
        run.events.wait_for("upload_failed")
    assert said_of_it in run.events.figures("upload_failed")["reason"]
    (said,) = [line for line in caplog.messages if line.startswith("Not yet uploaded to")]
    assert "\n" not in said
