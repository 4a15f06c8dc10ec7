"""Faults on request: a fault of the spec happens at its point, and nothing else happens anywhere."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts import generate_fault_reference
from tests.source_modules import Module, dotted, modules_of
from torchtitan_lite import faults
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import logger

ROOT = Path(__file__).parents[1]
FILE = Path("outputs/checkpoint/step-10.staging-0f3a/__1_0.distcp")
PASSES = """
import sys
from torchtitan_lite import faults
faults.install(sys.argv[1], rank=int(sys.argv[2]))
for step in range(1, 4):
    print(step, flush=True)
    faults.point("step", step=step)
print("end", flush=True)
"""


def fired(pass_point: Callable[[], object], times: int) -> list[int]:
    """Return which of that many passes failed, from 1."""
    failed = []
    for number in range(1, times + 1):
        try:
            pass_point()
        except OSError:
            failed.append(number)
    return failed


def passing(name: str = "write", **where: object) -> Callable[[], None]:
    return lambda: faults.point(name, **where)  # type: ignore[arg-type]  # steps and paths, as each test has them


def test_with_nothing_installed_every_point_is_passed_and_every_write_is_complete() -> None:
    for name in faults.POINTS:
        faults.point(name, step=1, path=FILE)
    assert faults.limit("write", 100, path=FILE) == 100


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT, errno.ESTALE])
def test_an_error_is_the_one_that_the_system_would_give_with_the_file_in_it(code: int) -> None:
    faults.install(f"{errno.errorcode[code]}@open", rank=0)
    with pytest.raises(OSError) as raised:
        faults.point("open", path=FILE)
    assert (raised.value.errno, raised.value.filename) == (code, str(FILE))
    assert type(raised.value) is type(OSError(code, os.strerror(code)))
    assert raised.value.strerror == os.strerror(code)


def test_an_error_at_a_point_without_a_path_names_none() -> None:
    faults.install("EIO@manifest", rank=0)
    with pytest.raises(OSError) as raised:
        faults.point("manifest")
    assert raised.value.filename is None


def test_a_fault_happens_once_by_default() -> None:
    faults.install("EIO@write", rank=0)
    assert fired(passing(), 4) == [1]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ("times=2", [1, 2]),
        ("times=always", [1, 2, 3, 4, 5]),
        ("after=2", [3]),
        ("after=1,times=3", [2, 3, 4]),
        ("after=9", []),
    ],
)
def test_after_and_times_choose_among_the_passes(conditions: str, expected: list[int]) -> None:
    faults.install(f"EIO@write:{conditions}", rank=0)
    assert fired(passing(), 5) == expected


@pytest.mark.parametrize(
    ("conditions", "rank", "process", "happens"),
    [
        ("", 3, "writer", True),
        ("rank=1", 1, "trainer", True),
        ("rank=1", 0, "trainer", False),
        ("process=writer", 0, "writer", True),
        ("process=writer", 0, "trainer", False),
        ("process=trainer,rank=2", 2, "trainer", True),
        ("process=trainer,rank=2", 2, "writer", False),
    ],
)
def test_rank_and_process_select_where_a_fault_happens(conditions: str, rank: int, process: str, happens: bool) -> None:
    faults.install(f"EIO@write:{conditions}", rank=rank, process=process)
    assert fired(passing(), 1) == [1] * happens


@pytest.mark.parametrize(
    ("glob", "path", "happens"),
    [
        ("*.distcp", FILE, True),
        ("step-10.staging-*/*", FILE, True),
        ("*/__1_*.distcp", FILE, True),
        ("step-11.staging-*/*", FILE, False),
        ("__0_*", FILE, False),
        ("*", None, False),
    ],
)
def test_a_glob_selects_the_files(glob: str, path: Path | None, happens: bool) -> None:
    faults.install(f"EIO@write:path={glob}", rank=0)
    assert fired(passing(path=path), 1) == [1] * happens


def test_the_step_is_the_one_of_the_point_or_else_the_one_that_was_set() -> None:
    faults.install("EIO@write:step=10,times=always", rank=0)
    assert not fired(passing(), 1), "no step was set yet"
    faults.set_step(10)
    assert fired(passing(), 1)
    assert not fired(passing(step=9), 1)
    faults.set_step(11)
    assert not fired(passing(), 1)
    assert fired(passing(step=10), 1)


def test_only_matching_passes_are_counted() -> None:
    faults.install("EIO@write:step=10,path=*.distcp,after=1", rank=0)
    passes = [
        passing("write", step=9, path=FILE),
        passing("write", step=10, path=Path("manifest.json")),
        passing("fsync", step=10, path=FILE),
        passing("write", step=10, path=FILE),
    ]
    assert not any(fired(one, 1) for one in passes)
    assert fired(passes[-1], 1)


def test_several_faults_are_counted_separately() -> None:
    faults.install("EIO@write:after=1; ENOSPC@fsync ;EROFS@write:after=2;", rank=0)
    assert fired(passing("write"), 4) == [2, 3]
    assert fired(passing("fsync"), 2) == [1]


def test_a_new_spec_replaces_the_installed_one() -> None:
    faults.install("EIO@write:times=always", rank=0)
    faults.install("EIO@fsync:times=always", rank=0)
    assert not fired(passing("write"), 1)
    assert fired(passing("fsync"), 1)
    faults.install("", rank=0)
    assert not fired(passing("fsync"), 1)


def test_an_installed_spec_can_be_handed_to_another_process() -> None:
    spec = "EIO@write:process=writer; EIO@stage:rank=3"
    faults.install(spec, rank=0)
    assert faults.installed() == spec
    faults.install("", rank=0)
    assert faults.installed() == ""


def test_threads_that_pass_a_point_together_meet_a_fault_as_often_as_the_spec_says() -> None:
    faults.install("EIO@write:after=100,times=50", rank=0)
    failed: list[int] = []
    together = threading.Barrier(8)

    def passes() -> None:
        together.wait(60)
        failed.extend(fired(passing(), 100))

    threads = [threading.Thread(target=passes) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failed) == 50


def test_a_short_write_returns_its_length_and_the_rest_is_written(tmp_path: Path) -> None:
    faults.install("short@write:after=1", rank=0)
    written = _write_all(tmp_path / "file", b"abcdef", b"ghijklm", b"nop")
    assert written == [6, 4, 3, 3]
    assert (tmp_path / "file").read_bytes() == b"abcdefghijklmnop"


def test_a_file_is_written_to_its_end_also_if_every_write_is_short(tmp_path: Path) -> None:
    faults.install("short@write:times=always", rank=0)
    assert _write_all(tmp_path / "file", b"a" * 100) == [50, 25, 13, 6, 3, 2, 1]


def test_a_torn_write_leaves_its_first_half_and_fails(tmp_path: Path) -> None:
    faults.install("tear@write:after=1", rank=0)
    with pytest.raises(OSError) as raised:
        _write_all(tmp_path / "file", b"abcdef", b"ghijkl", b"mnopqr")
    assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == b"abcdefghi"


def test_writes_after_a_torn_one_that_was_given_up_are_complete(tmp_path: Path) -> None:
    faults.install("tear@write", rank=0)
    assert faults.limit("write", 100, path=tmp_path / "file") == 50
    assert faults.limit("write", 100, path=tmp_path / "other") == 100
    assert faults.limit("write", 50, path=tmp_path / "file") == 50


def test_a_write_meets_every_kind_of_fault() -> None:
    faults.install("ENOSPC@write:path=*.distcp", rank=0)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        faults.limit("write", 100, path=FILE)


def test_slow_waits_for_its_seconds_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    faults.install("slow@fsync:seconds=25e-2,times=2;slow@open", rank=0)
    assert not fired(passing("fsync"), 3)
    assert not fired(passing("open"), 1)
    assert waited == [0.25, 0.25, 1.0]


def test_kill_is_a_sigkill_at_its_point() -> None:
    ended = _run("kill@step:step=2", rank=0)
    assert (ended.stdout.split(), ended.returncode) == (["1", "2"], -signal.SIGKILL)


def test_a_kill_for_another_rank_does_nothing() -> None:
    ended = _run("kill@step:step=2,rank=1", rank=0)
    assert (ended.stdout.split(), ended.returncode) == (["1", "2", "3", "end"], 0)


def test_lock_keeps_every_thread_of_the_process_from_running_python() -> None:
    code = (
        "import threading; from torchtitan_lite import faults; faults.install('lock@step', rank=0); "
        "threading.Timer(0.2, print, ['ran'], {'flush': True}).start(); faults.point('step')"
    )
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, timeout=1.5, check=False)
    assert expired.value.stdout is None


def test_stop_stops_the_process_until_a_sigcont() -> None:
    with subprocess.Popen(_command("stop@step:step=2", 0), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
    assert (out.split(), process.returncode) == (["1", "2", "3", "end"], 0)


def test_a_fault_is_logged_when_it_is_installed_and_when_it_happens(caplog: pytest.LogCaptureFixture) -> None:
    with _heard(caplog):
        faults.install("EIO@open:rank=1; EIO@open:rank=0", rank=1)
        fired(passing("open", path=FILE), 2)
    lines = list(dict.fromkeys(record.message for record in caplog.records))  # A line may reach the handler twice.
    assert len(lines) == 2 and all("EIO@open:rank=1" in line for line in lines)
    assert str(FILE) in lines[1]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("kill", ["'kill'", "expected KIND@POINT"]),
        ("kil@write", ["'kil@write'", "expected a kind of fault, found 'kil'"]),
        ("ENOSPACE@write", ["found 'ENOSPACE'"]),
        ("kill@wirte", ["expected a point, found 'wirte'"]),
        ("kill@write:rnak=1", ["found 'rnak=1'"]),
        ("kill@write:rank", ["found 'rank'"]),
        ("kill@write:rank=one", ["rank: expected a number from 0, found 'one'"]),
        ("kill@write:step=-1", ["step: expected a number from 0, found '-1'"]),
        ("kill@write:process=reader", ["process: expected trainer or writer or uploader, found 'reader'"]),
        ("kill@write:times=0", ["times: expected a number from 1, or always, found '0'"]),
        ("kill@write:after=", ["after: expected a number from 0, found ''"]),
        ("kill@write:path=", ["path: expected a glob"]),
        ("slow@write:seconds=.", ["found '.'"]),
        ("slow@write:seconds=nan", ["seconds: expected a number of seconds, found 'nan'"]),
        ("slow@write:seconds=-1", ["found '-1'"]),
        ("EIO@write:seconds=1", ["expected seconds with slow only"]),
        ("tear@fsync", ["expected tear@write, found @fsync"]),
        ("short@open", ["expected short@write"]),
        ("kill@write:rank=1,rank=2", ["expected each condition once", "found 'rank=2'"]),
        ("EIO@write; kill@nowhere:rank=1", ["'kill@nowhere:rank=1'"]),
    ],
)
def test_a_bad_spec_is_one_error_that_names_the_part_and_lists_what_is_valid(spec: str, said: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        faults.install(spec, rank=7)
    message = str(raised.value)
    assert "\n" not in message and message.startswith("TORCHTITAN_LITE_FAULT: ")
    assert [part for part in [*said, *faults.KINDS, *faults.POINTS, *faults.CONDITIONS] if part not in message] == []


def test_a_bad_spec_leaves_the_installed_one() -> None:
    faults.install("EIO@write:times=always", rank=0)
    with pytest.raises(ConfigError):
        faults.install("EIO@fsync;nonsense", rank=0)
    assert fired(passing("write"), 1)


def test_a_bad_spec_ends_a_job_with_2_before_anything_else() -> None:
    ended = subprocess.run(
        [sys.executable, "train.py", "--no.such_key"],
        cwd=ROOT,
        env={**os.environ, "TORCHTITAN_LITE_FAULT": "kill@lunch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "ConfigError: TORCHTITAN_LITE_FAULT: 'kill@lunch': expected a point" in ended.stderr
    assert "no.such_key" not in ended.stderr


def test_passing_an_unknown_point_is_an_assertion_error() -> None:
    faults.install("EIO@write", rank=0)
    with pytest.raises(AssertionError):
        faults.point("wirte")


def test_the_code_passes_only_known_points() -> None:
    assert _points_in_the_code() <= faults.POINTS.keys()


def test_the_code_passes_every_known_point() -> None:
    assert faults.POINTS.keys() - _points_in_the_code() == set()


def test_the_tables_of_the_page_are_up_to_date() -> None:
    page = generate_fault_reference.PAGE.read_text(encoding="utf-8")
    assert page == generate_fault_reference.render(page), "run: python scripts/generate_fault_reference.py"
    for table in (faults.POINTS, faults.KINDS, faults.CONDITIONS):
        assert [name for name, meaning in table.items() if f"\n| `{name}` | {meaning} |\n" not in page] == []


def _points_in_the_code() -> set[str]:
    """Return the first argument of every `faults.point(...)` and `faults.limit(...)` in the package."""
    modules = [Module(ROOT / "train.py"), *modules_of(ROOT / "torchtitan_lite")]
    calls = [node for module in modules for node in module.nodes if isinstance(node, ast.Call)]
    return {
        str(ast.literal_eval(call.args[0])) for call in calls if dotted(call.func) in ("faults.point", "faults.limit")
    }


def _write_all(path: Path, *blocks: bytes) -> list[int]:
    """Write like a writer that continues after a short write; return the length of each write."""
    written = []
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            while block:
                allowed = faults.limit("write", len(block), path=path)
                written.append(file.write(block[:allowed]))
                block = block[written[-1] :]
    return written


def _run(spec: str, rank: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(spec, rank), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False)


def _command(spec: str, rank: int) -> list[str]:
    return [sys.executable, "-c", PASSES, spec, str(rank)]


class _heard:
    """Let log lines of the package reach `caplog`, also after another test has set up logging."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def __enter__(self) -> None:
        logger.addHandler(self._caplog.handler)

    def __exit__(self, *error: object) -> None:
        logger.removeHandler(self._caplog.handler)
