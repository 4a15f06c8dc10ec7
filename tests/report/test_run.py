"""What the report knows of a run: its starts, what became of its checkpoints, its time, its configuration."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from pathlib import Path

import pytest

from tests.cli.folders import half_written
from tests.report.histories import (
    BEGUN,
    CONFIG,
    copy_of,
    killed_and_resumed,
    ledger,
    loaded,
    metric,
    saved,
    write_lines,
)
from torchtitan_lite.accounts import read_accounts
from torchtitan_lite.config.drift import Rule
from torchtitan_lite.errors import CheckpointError, CheckpointNotFound
from torchtitan_lite.report.changes import differences, shown_on_page, without_secret_values
from torchtitan_lite.report.curves import spans_of, stalls_by_line, time_ceiling
from torchtitan_lite.report.page import render_page
from torchtitan_lite.report.run import read_run, steps_per_line
from torchtitan_lite.report.saved_steps import shard_map
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.manifest import CheckpointKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_and_resumed(tmp_path_factory.mktemp("runs") / "resumed")


def test_each_start_is_known_by_the_step_it_loaded_and_by_its_end(folder: Path) -> None:
    starts = read_run(str(folder)).starts
    assert [(start.loaded.step, start.last_step, start.end) for start in starts] == [
        (0, 34, "killed"),
        (30, 45, "preempted"),
        (45, 60, "finished"),
    ]
    assert starts[1].signal == 15
    assert starts[1].loaded.seconds == 0.5


def test_a_fallback_to_an_older_checkpoint_is_one_start(tmp_path: Path) -> None:
    events = saved(10, BEGUN) + saved(20, BEGUN + 5)
    events += [
        {"event": "load_started", "step": 20, "time": BEGUN + 50},
        {"event": "load_failed", "step": 20, "time": BEGUN + 51, "finding": "cut"},
        {"event": "load_started", "step": 10, "time": BEGUN + 52},
        {"event": "loaded", "step": 10, "time": BEGUN + 53, "seconds": 1.0},
    ]
    write_lines(tmp_path / "events.jsonl", events)
    write_lines(tmp_path / "ledger.jsonl", ledger(BEGUN, BEGUN + 50))
    assert [start.loaded.step for start in read_run(str(tmp_path)).starts] == [0, 10]


def test_a_run_that_rolled_back_by_itself_is_one_start_that_says_so(tmp_path: Path) -> None:
    events = saved(10, BEGUN) + saved(20, BEGUN + 5)
    events += [
        {"event": "diverged", "step": 25, "time": BEGUN + 6, "reason": "loss is nan", "skipped_batch": 25},
        {"event": "load_started", "step": 20, "time": BEGUN + 7},
        {"event": "loaded", "step": 20, "time": BEGUN + 8, "seconds": 1.0},
        *saved(30, BEGUN + 9),
        {"event": "diverged", "step": 35, "time": BEGUN + 10, "reason": "loss is inf"},
    ]
    write_lines(tmp_path / "events.jsonl", events)
    (start,) = read_run(str(tmp_path)).starts
    assert (start.loaded.step, start.last_step, len(start.diverged)) == (0, 30, 2)
    page = render_page([read_run(str(tmp_path))])
    assert "step 25: loss is nan; rolled back, without batch 25" in page
    assert "step 35: loss is inf<" in page


def test_a_run_whose_first_event_is_its_end_is_shown_and_its_next_start_is_another_one(tmp_path: Path) -> None:
    events = [{"event": "diverged", "step": 3, "time": BEGUN, "reason": "loss is nan"}]
    write_lines(tmp_path / "events.jsonl", events)
    (start,) = read_run(str(tmp_path)).starts
    assert (start.loaded.step, [event.step for event in start.diverged]) == (0, [3])
    events += [
        *saved(10, BEGUN + 5),
        {"event": "diverged", "step": 15, "time": BEGUN + 6, "reason": "loss is nan"},
        {"event": "load_started", "step": 10, "time": BEGUN + 50},
        {"event": "loaded", "step": 10, "time": BEGUN + 51, "seconds": 1.0},
    ]
    write_lines(tmp_path / "events.jsonl", events)
    write_lines(tmp_path / "ledger.jsonl", ledger(BEGUN, BEGUN + 49))
    assert [start.loaded.step for start in read_run(str(tmp_path)).starts] == [0, 10]


def test_what_happened_before_the_first_start_of_the_ledger_counts_for_that_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "events.jsonl", saved(0, BEGUN) + saved(10, BEGUN + 60))
    write_lines(tmp_path / "ledger.jsonl", ledger(BEGUN + 50))
    run = read_run(str(tmp_path))
    assert [(save.step, save.start) for save in run.saves] == [(0, 1), (10, 1)]


def test_starts_of_a_ledger_count_those_that_left_no_event(tmp_path: Path) -> None:
    write_lines(tmp_path / "events.jsonl", saved(10, BEGUN + 20))
    begin = {"record": "start", "world_size": 4, "topology": "dp_shard 4"}
    write_lines(
        tmp_path / "ledger.jsonl",
        [
            begin | {"start": "a", "time": BEGUN},
            {"record": "loaded", "start": "a", "time": BEGUN + 1, "step": 0, "from": "fresh"},
            {"record": "beat", "start": "a", "time": BEGUN + 6, "step": 7, "seconds": {"starting": 1, "productive": 5}},
            begin | {"start": "b", "time": BEGUN + 10},
            {"record": "loaded", "start": "b", "time": BEGUN + 11, "step": 0, "from": "fresh"},
            {
                **{"record": "end", "start": "b", "time": BEGUN + 30, "step": 12, "why": "failed"},
                "seconds": {"starting": 1, "redone": 7, "productive": 12},
            },
        ],
    )
    run = read_run(str(tmp_path))
    assert [(start.last_step, start.end, start.topology) for start in run.starts] == [
        (7, "killed", "dp_shard 4"),
        (12, "failed", "dp_shard 4"),
    ]
    assert run.parts == {"productive": 17, "redone": 7, "starting": 2, "down": 4}
    assert run.goodput == read_accounts(tmp_path).goodput == 17 / 30
    assert [save.start for save in run.saves] == [2]


def test_a_load_from_memory_is_named(tmp_path: Path) -> None:
    memory = {"origin": "memory", "at_risk_steps": 3}
    events = saved(10, BEGUN) + [event | memory for event in loaded(13, BEGUN + 50)]
    write_lines(tmp_path / "events.jsonl", events)
    begun = {"record": "loaded", "start": "1", "time": BEGUN + 51, "step": 13, "from": "memory"}
    write_lines(tmp_path / "ledger.jsonl", [*ledger(BEGUN, BEGUN + 49), begun])
    run = read_run(str(tmp_path))
    assert [(start.loaded.step, start.loaded.is_from_memory) for start in run.starts] == [(0, False), (13, True)]
    assert "from memory, 3 ahead of the disk" in render_page([run])


def test_each_checkpoint_is_kept_purged_or_set_aside(folder: Path) -> None:
    fates = [(save.step, save.fate.value) for save in read_run(str(folder)).saves]
    assert fates == [
        *[(10, "purged"), (20, "kept"), (30, "kept"), (40, "quarantined")],
        *[(45, "kept"), (50, "kept"), (60, "kept")],
    ]


def test_a_step_saved_on_two_branches_has_a_fate_of_each(tmp_path: Path) -> None:
    from tests.cli.folders import add_step

    loads = [{"event": "loaded", "step": 10, "time": BEGUN + 50, "seconds": 1.0}]
    first = {"event": "load_started", "step": 10, "time": BEGUN + 49}
    events = saved(10, BEGUN) + saved(20, BEGUN + 5) + [first, *loads] + saved(20, BEGUN + 60)
    write_lines(tmp_path / "events.jsonl", events)
    write_lines(tmp_path / "ledger.jsonl", ledger(BEGUN, BEGUN + 49))
    for step, name, moment in ((10, "", 0), (20, "step-20.abandoned-ab12", 5), (20, "", 60)):
        add_step(tmp_path / "checkpoint", step, name=name, created_at=BEGUN + moment)
    saves = read_run(str(tmp_path)).saves
    assert [(save.step, save.start, save.fate.value) for save in saves] == [
        *[(10, 1, "kept"), (20, 1, "abandoned"), (20, 2, "kept")],
    ]


def test_the_export_of_the_last_step_is_a_save_next_to_the_full_one(tmp_path: Path) -> None:
    from tests.cli.folders import add_step

    export = [event | {"kind": "weights_only"} for event in saved(20, BEGUN + 6, nbytes=2_000_000)]
    write_lines(tmp_path / "events.jsonl", [*saved(10, BEGUN), *saved(20, BEGUN + 5), *export])
    config = CONFIG | {"checkpoint": {"folder": "checkpoint", "export_folder": "export"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for step, moment in ((10, 0), (20, 5)):
        add_step(tmp_path / "checkpoint", step, created_at=BEGUN + moment)
    add_step(tmp_path / "export", 20, kind=CheckpointKind.WEIGHTS_ONLY, created_at=BEGUN + 6)
    assert [(save.step, save.kind, save.nbytes, save.fate.value) for save in read_run(str(tmp_path)).saves] == [
        (10, "full", 10_000_000, "kept"),
        (20, "full", 10_000_000, "kept"),
        (20, "weights_only", 2_000_000, "kept"),
    ]


def test_a_cut_save_and_a_failed_one_are_known_from_events(tmp_path: Path) -> None:
    from tests.cli.folders import add_step

    events = [
        {"event": "save_started", "step": 10, "time": BEGUN, "kind": "full"},
        {"event": "save_failed", "step": 10, "time": BEGUN + 1, "reason": "disk full", "in_a_row": 1},
        {"event": "save_started", "step": 20, "time": BEGUN + 5, "kind": "full"},
        {"event": "load_started", "step": 5, "time": BEGUN + 50},
        {"event": "loaded", "step": 5, "time": BEGUN + 51, "seconds": 1.0},
        {"event": "save_started", "step": 20, "time": BEGUN + 60, "kind": "full"},
    ]
    write_lines(tmp_path / "events.jsonl", events)
    write_lines(tmp_path / "ledger.jsonl", ledger(BEGUN, BEGUN + 49))
    half_written(add_step(tmp_path / "checkpoint", 20, name="step-20.staging-0f3a"))
    saves = read_run(str(tmp_path)).saves
    assert [(save.fate.value, save.note) for save in saves] == [
        ("failed", "disk full"),
        ("cut off", ""),
        ("under way", ""),
    ]


def test_a_torn_line_and_a_step_that_comes_again_are_no_second_point(tmp_path: Path) -> None:
    write_lines(tmp_path / "metrics.jsonl", [metric(1), metric(2), metric(3), metric(2, loss=9.0)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss_me')
    logged = read_run(str(tmp_path)).logged
    assert (list(logged.steps), logged.loss[-1]) == ([1, 2], 9.0)


def test_a_loss_that_is_not_finite_is_a_gap(tmp_path: Path) -> None:
    record = metric(2) | {"loss_metrics/global_avg_loss": None}
    write_lines(tmp_path / "metrics.jsonl", [metric(1), record, metric(3)])
    assert [math.isfinite(loss) for loss in read_run(str(tmp_path)).logged.loss] == [True, False, True]


def test_a_run_that_has_lost_its_ledger_is_one_start_of_unknown_time(folder: Path, tmp_path: Path) -> None:
    run = copy_of(folder, tmp_path / "run")
    (run / "ledger.jsonl").unlink()
    found = read_run(str(run))
    assert [(start.last_step, start.end) for start in found.starts] == [(60, "finished")]
    assert found.parts == {} and math.isnan(found.goodput)
    assert [save.fate.value for save in found.saves] == [save.fate.value for save in read_run(str(folder)).saves]
    assert "is not there" in render_page([found])


def test_a_logged_line_covers_the_steps_since_the_last_one_or_the_load() -> None:
    assert steps_per_line([1, 10, 20, 30, 40], [0, 25]) == [1, 9, 10, 5, 10]


def test_a_stall_is_in_the_step_that_is_logged_after_it(folder: Path) -> None:
    run = read_run(str(folder))
    stalled = {span.last: span.stall_seconds for span in spans_of(run) if span.stall_seconds}
    assert stalled == pytest.approx({11: 0.05, 21: 0.05, 41: 0.125, 51: 0.05})
    assert stalls_by_line([10, 20], [(20, 1.0, None)]) == {}, "the last save is in no logged step"
    assert stalls_by_line([10, 20], [(10, 1.0, 15)]) == {}, "a later start loaded step 15, and logged step 20"
    merged = spans_of(run, limit=6)
    assert len(merged) == 6
    assert sum(span.stall_seconds * (span.last - span.first) for span in merged) == pytest.approx(0.275)


def test_one_step_that_is_far_longer_does_not_flatten_the_others(tmp_path: Path) -> None:
    lines = [metric(step, seconds=60.0 if step == 1 else 0.25) for step in range(1, 101)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    assert time_ceiling(spans_of(read_run(str(tmp_path)))) == pytest.approx(0.375)


def test_what_changed_between_starts_is_known(folder: Path) -> None:
    changes = read_run(str(folder)).changes
    assert [(number, [str(change.key) for change in found]) for number, found in changes.items()] == [
        (2, []),
        (3, ["optimizer.lr"]),
    ]
    (change,) = changes[3]
    assert (change.before, change.now, change.rule) == ("0.0008", "0.0004", Rule.WARNED)


def test_no_secret_of_a_configuration_is_shown() -> None:
    config = {
        "training": {
            "dataset_path": "https://me:hunter2@host/data?X-Token=abc123&split=a",
            "tokens_folder": "tokens",
            "seq_len": 256,
        },
        "hub": {"token": "hf_123", "api_key": "k", "tokenizer_path": "bytes", "keep_best_metric": "loss"},
    }
    values = {key: shown_on_page(value) for key, value in without_secret_values(config).items()}
    assert values == {
        "training.dataset_path": "https://(hidden)@host/data?X-Token=(hidden)&split=a",
        "training.tokens_folder": "tokens",
        "training.seq_len": "256",
        "hub.token": "(hidden)",
        "hub.api_key": "(hidden)",
        "hub.tokenizer_path": "bytes",
        "hub.keep_best_metric": "loss",
    }


def test_every_key_of_a_real_configuration_is_shown() -> None:
    from torchtitan_lite.config.job_config import JobConfig

    config = JobConfig().to_dict()
    hidden = [key for key, value in without_secret_values(config).items() if value == "(hidden)"]
    assert hidden == []


def test_a_key_that_one_side_lacks_is_no_change() -> None:
    assert differences({"a.b": 1}, {"a.b": 1.5, "a.new": 2})[0].key == "a.b"
    assert len(differences({"a.b": 1}, {"a.b": 1.5, "a.new": 2})) == 1


def test_the_bytes_of_a_rank_are_those_of_its_files() -> None:
    sizes = {"__0_0.distcp": 100, "__0_1.distcp": 20, "__1_0.distcp": 50, ".metadata": 7}
    found = shard_map(3, sizes, {"__0_0.distcp": {"model": 60, "optimizer": 30}, "__1_0.distcp": {"model": 50}})
    assert found is not None
    assert found.totals == {0: 120, 1: 50}
    assert found.ranks[0] == {"model": 60, "optimizer": 30, "other": 30}
    assert shard_map(3, {".metadata": 7}, {}) is None


def test_what_is_no_dump_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has none of metrics"):
        read_run(str(tmp_path))
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        read_run(str(tmp_path / "absent"))


def test_a_run_is_read_from_its_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = read_run(str(tmp_path))
    assert (run.status, run.last_step, run.total_steps) == ("unknown", 0, 60)


def test_what_changed_is_known_without_the_configuration_of_the_last_start(folder: Path, tmp_path: Path) -> None:
    run = copy_of(folder, tmp_path / "run")
    lines = [(0, 8e-4, 10), (99, 8e-4, 15), (199, 4e-4, 15)]
    write_lines(
        run / "configs.jsonl",
        (
            {"time": BEGUN + moment, "config": CONFIG | {"optimizer": {"lr": lr}, "checkpoint": {"interval": interval}}}
            for moment, lr, interval in lines
        ),
    )
    (run / "config.json").unlink()
    changes = read_run(str(run)).changes
    assert [change.key for change in changes[2]] == ["checkpoint.interval"]
    assert [change.key for change in changes[3]] == ["optimizer.lr"]


def test_the_trainer_keeps_each_configuration_that_differs_from_the_last(tmp_path: Path) -> None:
    from torchtitan_lite.config.manager import parse_config
    from torchtitan_lite.metrics.announcement import write_config

    for lr in ("1e-3", "1e-3", "2e-3", "1e-3"):
        write_config(tmp_path, parse_config([f"--optimizer.lr={lr}"]))
    lines = [json.loads(line) for line in (tmp_path / "configs.jsonl").read_text().splitlines()]
    assert [line["config"]["optimizer"]["lr"] for line in lines] == [1e-3, 2e-3, 1e-3]
    assert lines[-1]["config"] == json.loads((tmp_path / "config.json").read_text())


def test_a_run_whose_job_holds_the_folder_is_running_and_else_it_was_killed(folder: Path, tmp_path: Path) -> None:
    run = copy_of(folder, tmp_path / "run")
    lines = [line for line in (run / "events.jsonl").read_text().splitlines() if "finished" not in line]
    (run / "events.jsonl").write_text("\n".join(lines) + "\n")
    (run / "ledger.jsonl").write_text(
        (run / "ledger.jsonl").read_text().replace(', "why": "finished"', "").replace("end", "beat")
    )
    lock, holder = run / "checkpoint" / "writer.lock", Holder.this_process("ab12", BEGUN)
    assert read_run(str(run)).status == "unknown"
    lock.write_bytes(holder.to_bytes(1, BEGUN + 210))
    assert read_run(str(run), now=BEGUN + 220).status == "running"
    gone = dataclasses.replace(holder, pid=2**30)
    lock.write_bytes(gone.to_bytes(1, BEGUN + 210))
    assert read_run(str(run), now=BEGUN + 220).status == "killed"
    of_another_machine = dataclasses.replace(holder, space="elsewhere")
    lock.write_bytes(of_another_machine.to_bytes(1, BEGUN + 210))
    assert read_run(str(run), now=BEGUN + 220).status == "running"
    assert read_run(str(run), now=BEGUN + 900).status == "killed"


@pytest.mark.slow
def test_thousands_of_starts_and_saves_are_a_small_page(tmp_path: Path) -> None:
    events = []
    for start in range(300):
        at, begin = BEGUN + 1000 * start, 100 * start
        events += loaded(begin, at) if start else []
        for step in range(begin + 5, begin + 101, 5):
            events += saved(step, at + 5 * (step - begin))
            events.append({"event": "purged", "step": step, "time": at + 5 * (step - begin) + 100, "bytes": 1})
    write_lines(tmp_path / "events.jsonl", sorted(events, key=lambda event: event["time"]))
    write_lines(tmp_path / "ledger.jsonl", ledger(*(BEGUN + 1000 * start - 1 for start in range(300))))
    write_lines(tmp_path / "metrics.jsonl", (metric(step) for step in range(10, 30_001, 10)))
    page = render_page([read_run(str(tmp_path))])
    assert len(page) < 1_500_000
    assert 'class="purged" value="6000"' in page


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("events.jsonl", '{"event": "committed", "step": 10, "time": 1e300, "bytes": 5}'),
        ("events.jsonl", '{"event": "committed", "step": 10, "time": 1e17, "bytes": "5", "seconds": [1]}'),
        ("events.jsonl", '{"event": "committed", "step": 10, "time": 5, "bytes": 5, "seconds": NaN}'),
        ("events.jsonl", '{"event": "loaded", "step": 10, "time": 5, "seconds": "short"}'),
        ("events.jsonl", '{"event": "loaded", "step": 1' + 400 * "0" + ', "time": 5}'),
        ("metrics.jsonl", '{"step": 1' + 400 * "0" + "}"),
        ("metrics.jsonl", '{"step": 70, "loss_metrics/global_avg_loss": 1' + 400 * "0" + "}"),
        (
            "metrics.jsonl",
            '{"step": 70, "loss_metrics/global_avg_loss": 1e308}\n{"step": 71, "loss_metrics/global_avg_loss": -1e308}',
        ),
        ("ledger.jsonl", '{"record": "start", "start": "a", "time": 1' + 400 * "0" + "}"),
        ("ledger.jsonl", 9999 * "["),
        ("config.json", '{"job": {"description": "\\ud800"}}'),
    ],
)
def test_a_line_that_no_run_writes_does_not_keep_the_page_from_being_written(
    folder: Path, tmp_path: Path, name: str, line: str
) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    written = copy / name
    written.write_text(
        f"{line}\n" if name == "config.json" else f"{written.read_text() if written.exists() else ''}{line}\n"
    )
    assert render_page([read_run(str(copy))]).encode()


def test_a_run_in_a_folder_whose_name_is_not_utf_8_has_a_page(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, Path(os.fsdecode(os.fsencode(tmp_path) + b"/run\xff")))
    assert b"run?" in render_page([read_run(str(copy))]).encode()


def test_a_start_says_what_it_began_from(tmp_path: Path) -> None:
    lines: list[dict] = []
    for index, begun in enumerate(("fresh", "seed", "initial", "memory", "")):
        at = BEGUN + 10 * index
        lines.append({"record": "start", "start": str(index), "time": at})
        step = 7 if begun == "memory" else 0
        if begun:
            lines.append({"record": "loaded", "start": str(index), "time": at + 1, "step": step, "from": begun})
    write_lines(tmp_path / "ledger.jsonl", lines)
    events = [event | {"origin": "memory"} for event in loaded(7, BEGUN + 30.5)]
    write_lines(tmp_path / "events.jsonl", events)
    run = read_run(str(tmp_path))
    assert [start.loaded.origin for start in run.starts] == ["fresh", "seed", "initial", "memory", ""]
    cells = re.findall(r"<td>2027-01-15 .*</td>\s*<td class=.number.>(.*?)</td>", render_page([run]))
    assert cells[-5:] == ["fresh", "seed", "initial weights", "7", "none"]
