"""The bench compares each loaded state with the saved one, and judges each target by its own samples."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"
WAITING = {"ours", "ours, no digests", "dcp", "torch.save"}
BACKGROUND = {
    "raw copied",
    "ours thread",
    "ours process",
    "ours manager",
    "dcp thread",
    "dcp process",
    "dcp process, shared memory",
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_checkpoint

    return bench_checkpoint


@pytest.mark.slow
def test_a_quick_run_of_one_workload_has_its_lines_only_and_leaves_no_file(tmp_path: Path) -> None:
    folder, found = tmp_path / "files", tmp_path / "bench.json"
    options = ["--quick", "--rounds", "1", "--workloads", "small", "--folder", str(folder), "--json", str(found)]
    printed = _output_of([str(SCRIPTS / "bench_checkpoint.py"), *options])
    assert not [line for line in printed.splitlines() if len(line) > 80]
    assert not list(folder.iterdir()), "no file is left"
    lines = json.loads(found.read_text(encoding="utf-8"))["table"]
    assert {line["workload"] for line in lines} == {"small"}
    assert {line["contender"] for line in lines} >= {"ours", "dcp"}


@pytest.mark.exhaustive  # A minute and a half of computing.
def test_a_quick_run_measures_every_line_and_names_every_target(tmp_path: Path) -> None:
    scale, found = tmp_path / "scale.json", tmp_path / "bench.json"
    scale.write_text(json.dumps({"targets": {"CPU of a load plan, 8B, 16,384 ranks": 0.5}}), encoding="utf-8")
    folder = tmp_path / "files"
    folder.mkdir()
    options = [
        "--quick",
        "--rounds",
        "1",
        "--targets",
        "--scale",
        str(scale),
        "--folder",
        str(folder),
        "--json",
        str(found),
    ]
    printed = _output_of([str(SCRIPTS / "bench_checkpoint.py"), *options])
    document = json.loads(found.read_text(encoding="utf-8"))

    assert not [line for line in printed.splitlines() if len(line) > 80]
    assert not list(folder.iterdir()), "no file is left"
    assert {"cores", "memory_bytes", "kernel", "torch", "filesystem"} <= document["machine"].keys()
    lines = {(line["workload"], line["contender"], line["figure"]) for line in document["table"]}
    assert lines == {(each["workload"], each["contender"], each["figure"]) for each in document["samples"]}
    raw = set() if "raw" in document["skipped"] else {"raw"}
    for figure in ("save_seconds", "save_cpu_seconds", "cold_load_seconds", "warm_load_seconds"):
        assert {name for load, name, which in lines if (load, which) == ("llama", figure)} >= WAITING | raw
    for figure in ("first_stall_seconds", "stall_seconds", "durable_seconds"):
        assert {name for load, name, which in lines if (load, which) == ("llama", figure)} == BACKGROUND
    for load in ("small", "fsdp2"):
        assert {name for other, name, _ in lines if other == load} >= {"ours", "dcp"} | raw
    assert {name for _, name, which in lines if which == "load_extra_bytes"} >= WAITING
    assert {load for load, _, which in lines if which == "max_to_mean_ratio"} == {"ddp bytes", "hsdp bytes"}
    for name in WAITING | BACKGROUND | raw:
        assert name[:25] in printed
    for name in WAITING | raw:
        assert f"{name}: {document['who_syncs'][name]}" in printed
    for target in document["targets"]:
        assert target["name"] in printed
    verdicts = {target["name"]: target["verdict"] for target in document["targets"]}
    assert verdicts["CPU of a load plan, 8B, 16,384 ranks"] == "reached"
    assert verdicts["CPU of a repeated plan, 8B, 16,384 ranks"] == "scripts/simulate_scale.py measures it"


@pytest.mark.parametrize(
    ("ours", "raw", "verdict"),
    [([1.0, 3.0], [1.0, 3.0], "reached"), ([1.0, 3.0], [1.0, 1.0], "missed"), ([1.0], [], "not measured in this run")],
)
def test_a_target_is_judged_by_the_ratios_of_rounds(
    bench: ModuleType, ours: list[float], raw: list[float], verdict: str
) -> None:
    samples = bench.Samples()
    for name, values in (("ours", ours), ("raw", raw)):
        for number, value in enumerate(values):
            samples.add("llama", name, "save_seconds", number, value)
    lines = {line["name"]: line for line in bench.targets.judged(samples)}
    assert lines["durable save / raw direct write"]["verdict"] == verdict
    assert lines["dcp.save / our durable save"]["verdict"] == "not measured in this run"


def test_every_target_has_a_name_of_its_own_that_fits_into_the_table(bench: ModuleType) -> None:
    names = [target.name for target in bench.targets.all_targets()]
    assert len(names) == len(set(names))
    assert max(map(len, bench.report.targets(bench.targets.judged(bench.Samples())).splitlines())) <= 80


def test_a_line_fits_where_one_round_took_a_hundred_times_as_long(bench: ModuleType) -> None:
    samples = bench.Samples()
    for round, value in enumerate((0.001, 0.002, 0.2)):
        samples.add("llama", "memcpy with dcp process, shared memory", "others_seconds_of_a_long_name", round, value)
        samples.add("llama", "ours", "save_seconds", round, value)
    assert max(map(len, bench.report.tables(samples, {}).splitlines())) <= 80


def test_the_targets_of_an_earlier_run_are_judged_again_from_its_samples(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = bench.Samples()
    samples.add("llama", "ours", "load_extra_bytes", 0, 32 << 20)
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"samples": samples.to_json()}), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["bench_checkpoint.py", "--of", str(path)])
    assert bench.main() == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "extra memory of a load" in line]
    assert line.split()[-5:] == ["<=", "64", "MiB", "32.0", "reached"]


def test_a_contender_that_loads_another_state_than_it_saved_ends_the_run(bench: ModuleType, tmp_path: Path) -> None:
    torch_save: Any = bench.apart.CONTENDERS["torch.save"]

    class LoadsNothing(torch_save):  # type: ignore[misc]
        def load(self, *args: Any, **options: Any) -> None:
            """Leave the target unchanged."""

    state = bench.states.small_state(3)
    with pytest.raises(AssertionError, match=r"torch\.save, cold: model\.layers\.0\.w was not loaded as it was saved"):
        bench.in_turn.measure("small", state, [LoadsNothing()], tmp_path, 1, bench.Samples(), lambda _: None)


def test_files_are_cold_after_make_cold_and_warm_after_make_warm(bench: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    assert bench.disk.make_warm(tmp_path) == 1.0
    if bench.disk.takes_direct(tmp_path):  # Needs a real disk.
        assert bench.disk.make_cold(tmp_path) == 0.0


def test_a_folder_without_room_is_refused(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_checkpoint.py", "--params", "1e9", "--folder", str(tmp_path)])
    assert bench.main() == 2
    assert "name another --folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def _output_of(arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_a_folder_that_cannot_be_made_is_one_sentence(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["bench_checkpoint.py", "--quick", "--folder", str(tmp_path / "file" / "new")])
    assert bench.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}/file/new cannot be used: ")
    assert line.endswith("Name another --folder")


def test_the_speed_of_the_raw_disk_is_next_to_a_ratio_to_it(bench: ModuleType) -> None:
    samples = bench.Samples()
    for number in range(3):
        samples.add("llama", "raw", "save_seconds", number, 0.5)
        samples.add("llama", "raw", "file_bytes", number, 1e9)
        samples.add("llama", "ours", "save_seconds", number, 0.5)
    table = bench.report.targets(bench.targets.judged(samples))
    assert "raw disk: 2.00 GB/s" in table
    assert not [line for line in table.splitlines() if len(line) > 80]
