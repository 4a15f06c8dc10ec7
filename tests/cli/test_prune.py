"""`prune`: it decides as a training job does, and a dry run says what it would do."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Said
from tests.forked import REPO
from tests.store import filled
from tests.store.crashing import Crash, Cut
from tests.store.filled import contents, fill, names, save
from torchtitan_lite.cli import writing_verbs
from torchtitan_lite.cli.app import main, parse_verb
from torchtitan_lite.cli.prune import Prune
from torchtitan_lite.cli.screen import Screen
from torchtitan_lite.events import ignore
from torchtitan_lite.store.holder import Holder
from torchtitan_lite.store.housekeeping import Housekeeping
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.pins import Pins
from torchtitan_lite.store.retention import KeepLatest
from torchtitan_lite.store.store import CheckpointStore


def pin(root: Path, *steps: int) -> None:
    with Pins(root).changing() as pinned:
        pinned.update(steps)


def test_what_no_rule_keeps_is_removed_and_each_checkpoint_has_its_reason(tmp_path: Path, said: Said) -> None:
    store = CheckpointStore(tmp_path)
    for step, loss in {100: 3.0, 200: 1.0, 300: 2.0, 400: 9.0, 500: 8.0}.items():
        save(store, step, metrics={"loss": loss})
    save(store, 450, kind=CheckpointKind.WEIGHTS_ONLY)
    pin(tmp_path, 100)
    code, out, err = said("prune", tmp_path, "--keep-latest", 2, "--keep-best", 1)
    assert (code, err) == (0, "")
    assert [line.split(maxsplit=3)[0::3] for line in out.splitlines()[1:7]] == [
        ["100", "kept: pinned"],
        ["200", "kept: best 1 by loss"],
        ["300", "removed"],
        ["400", "kept: latest 2"],
        ["450", "kept: weights only"],
        ["500", "kept: latest 2, the latest"],
    ]
    assert out.splitlines()[-1] == "1 of 6 checkpoints removed (106 B)"
    assert names(tmp_path) == ["pins.json", "step-100", "step-200", "step-400", "step-450", "step-500"]


def test_a_dump_folder_stands_for_the_checkpoints_in_it(tmp_path: Path, said: Said) -> None:
    fill(tmp_path / "checkpoint", 1, 2, 3)
    assert said("prune", tmp_path, "--keep-latest", 2)[0] == 0
    assert names(tmp_path / "checkpoint") == ["step-2", "step-3"]


def test_a_dry_run_changes_nothing_and_needs_no_lease(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2, 3)
    (tmp_path / "writer.lock").write_bytes(Holder.this_process("a job", 0.0).to_bytes(1, 0.0))
    before = contents(tmp_path)
    code, out, _ = said("prune", tmp_path, "--keep-latest", 1, "--dry-run")
    assert code == 0 and out.splitlines()[-1] == "2 of 3 checkpoints would be removed (212 B)"
    assert contents(tmp_path) == before


def test_json_has_for_each_checkpoint_the_rules_that_keep_it(tmp_path: Path, said: Said) -> None:
    store = fill(tmp_path, 1, 2, 3)
    filled.damage(tmp_path, 1, "manifest.json")
    save(store, 4, metrics={"val": 0.5})
    code, out, err = said("prune", tmp_path, "--keep-every-n-steps", 4, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert {each["step"]: (each["removed"], each["kept_by"]) for each in found["checkpoints"]} == {
        2: (True, []),
        3: (True, []),
        4: (False, ["keep_every_n_steps", "latest", "latest_without_nan"]),
    }
    assert found["folder"] == str(tmp_path) and not found["dry_run"] and found["removed_bytes"] == 212
    assert found["checkpoints"][-1]["metrics"] == {"val": 0.5}
    assert [each["step"] for each in found["not_counted"]] == [1]


RULES: list[list[str]] = [
    *(["--keep-latest", str(count)] for count in (1, 2, 9)),
    *(["--keep-every-n-steps", str(count)] for count in (2, 3)),
    ["--keep-best", "1"],
    ["--keep-best", "2", "--metric", "max:val"],
    ["--keep-for-hours", "1"],
    ["--min-free-disk-gb", "1000000"],
    ["--min-free-disk-gb", "1"],
]
CHECKPOINT = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([CheckpointKind.FULL, CheckpointKind.FULL, CheckpointKind.WEIGHTS_ONLY]),
        "metrics": st.dictionaries(st.sampled_from(["loss", "val"]), st.floats(-2, 2)),
        "created_at": st.sampled_from([1.0, 4e9]),
    }
)


@pytest.mark.promise("A dry run of `prune` lists exactly what `prune` then removes.", section="kept")
@pytest.mark.slow
@given(
    st.dictionaries(st.integers(0, 12), CHECKPOINT, min_size=1, max_size=5),
    st.lists(st.sampled_from(RULES), min_size=1, max_size=3),
    st.sets(st.integers(0, 12), max_size=2),
    st.sets(st.integers(0, 12), max_size=1),
)
def test_a_dry_run_is_what_a_prune_then_does(
    tmp_path_factory: pytest.TempPathFactory,
    there: dict[int, dict[str, Any]],
    rules: list[list[str]],
    pinned: set[int],
    damaged: set[int],
) -> None:
    root = tmp_path_factory.mktemp("pruned")
    store = CheckpointStore(root)
    for step, options in there.items():
        save(store, step, **options)
    for step in damaged & there.keys():
        (root / f"step-{step}" / filled.DATA).write_bytes(b"cut")
    pin(root, *pinned)
    before, flags = names(root), itertools.chain(*rules)
    foreseen = said_json("prune", root, *flags, "--dry-run")
    assert names(root) == before
    done = said_json("prune", root, *itertools.chain(*rules))
    assert done["checkpoints"] == foreseen["checkpoints"]
    gone = {f"step-{each['step']}" for each in done["checkpoints"] if each["removed"]}
    assert names(root) == sorted({*before} - gone)


def said_json(*argv: object) -> Any:
    command = [str(word) for word in argv]
    output: list[Any] = []

    class Keep(Screen):
        def show(self, data: Any, render: Callable[[], Any]) -> None:
            output.append(data)

    assert parse_verb([*command, "--json"])[0].run(Keep(as_json=True)) == 0
    return output[0]


def test_a_prune_is_what_a_job_with_the_same_rules_would_do(tmp_path: Path, said: Said) -> None:
    of_job = fill(tmp_path / "job", 1, 2, 3, 4, 5)
    fill(tmp_path / "tool", 1, 2, 3, 4, 5)
    for name in ("job", "tool"):
        pin(tmp_path / name, 2)
        filled.damage(tmp_path / name, 5, "manifest.json")
    Housekeeping(KeepLatest(1), ignore).purge(of_job)
    assert said("prune", tmp_path / "tool", "--keep-latest", 1)[0] == 0
    assert contents(tmp_path / "job") == contents(tmp_path / "tool")


def half_of_dcp(root: Path) -> None:
    """Put into `root` what saves of plain DCP left that were killed."""
    filled.of_torchtitan(root)
    for step in (10, 20):
        (root / f"step-{step}" / ".metadata").unlink()


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda root: root.mkdir(), "there is no complete checkpoint in it"),
        (filled.foreign, "there is no complete checkpoint in it"),
        (filled.half_written, "there is no complete checkpoint in it"),
        (half_of_dcp, "no rule removes what has no manifest: step-10, step-20"),
        (filled.of_a_newer_version, "it has format version 99, this version reads up to"),
        (lambda root: None, "does not exist"),
        (lambda root: root.write_bytes(b""), "it is not a folder"),
    ],
    ids=["empty", "foreign", "half-written", "torchtitan", "newer", "nothing", "file"],
)
def test_where_there_is_nothing_to_prune_one_sentence_says_why(
    tmp_path: Path, said: Said, put: Callable[[Path], None], message: str
) -> None:
    root = tmp_path / "there"
    put(root)
    before = contents(tmp_path)
    code, out, err = said("prune", root, "--keep-latest", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {root}") and message in err
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prune", "ROOT"], "no rule is given, so every checkpoint would stay: set --keep-latest"),
        (["prune", "ROOT", "--keep-latest", "-1"], "--keep-latest: expected at least 0, found -1"),
        (["prune", "ROOT", "--keep-for-hours", "nan"], "--keep-for-hours: expected a finite number of at least 0"),
        (["prune", "ROOT", "--keep-best", "1", "--metric", ""], "--metric: expected the name of a metric"),
        (["prune", "ROOT", "--keep-best", "1", "--metric", "max:"], "--metric: expected the name of a metric"),
        (["prune", "ROOT:2", "--keep-latest", "1"], "ROOT:2 is one checkpoint: name the folder of checkpoints, ROOT"),
        (["prune", "ROOT/step-2", "--keep-latest", "1"], "is one checkpoint: name the folder"),
        (["prune", "hdfs://bucket/run", "--keep-latest", "1"], "'hdfs://bucket/run' is not the address of a folder"),
        (["prune", "--keep-latest", "1"], "FOLDER"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(tmp_path: Path, said: Said, argv: list[str], message: str) -> None:
    fill(tmp_path, 1, 2)
    code, out, err = said(*(word.replace("ROOT", str(tmp_path)) for word in argv))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.replace("ROOT", str(tmp_path)) in err
    assert names(tmp_path) == ["step-1", "step-2"]


def test_damaged_checkpoints_are_noted_and_stay(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2, 3, 4)
    filled.damage(tmp_path, 3, "manifest.json")
    (tmp_path / "step-2" / filled.DATA).unlink()
    code, out, err = said("prune", tmp_path, "--keep-latest", 1)
    assert code == 0 and "note: step 3 is neither counted nor removed: manifest.json" in err
    assert "kept: damaged" in next(line for line in out.splitlines() if line.lstrip().startswith("2 "))
    assert names(tmp_path) == ["step-2", "step-3", "step-4"]


def test_all_damaged_is_no_error_and_nothing_goes(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    for step in (1, 2):
        filled.damage(tmp_path, step, "manifest.json")
    code, out, err = said("prune", tmp_path, "--keep-latest", 1)
    assert code == 0 and err.count("note: step") == 2
    assert out.splitlines()[-1] == "0 of 0 checkpoints removed"


def test_a_malformed_file_of_pins_is_named_and_nothing_goes(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    (tmp_path / "pins.json").write_bytes(b"[1]")
    for more in ([], ["--dry-run"]):
        code, out, err = said("prune", tmp_path, "--keep-latest", 1, *more)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert str(tmp_path / "pins.json") in err
    assert names(tmp_path) == ["pins.json", "step-1", "step-2"]


def test_a_job_that_holds_the_folder_is_named_and_nothing_goes(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    holds = (
        "import sys; from pathlib import Path; from torchtitan_lite.store.lease import FolderLease\n"
        "lease = FolderLease(Path(sys.argv[1]), run_id='trains', heartbeat_seconds=0.1); lease.take()\n"
        "print('held', flush=True); sys.stdin.read(); lease.release()"
    )
    command = [sys.executable, "-c", holds, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPO) as job:
        assert job.stdout is not None and job.stdout.readline() == "held\n"
        code, out, err = said("prune", tmp_path, "--keep-latest", 1)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"error: {tmp_path} is in use by run trains (process {job.pid} on ")
        assert names(tmp_path) == ["step-1", "step-2", "writer.lock"]
        job.communicate("")
    assert said("prune", tmp_path, "--keep-latest", 1)[0] == 0
    assert names(tmp_path) == ["step-2"]


def test_a_job_of_another_host_that_is_silent_is_noted_and_then_taken_over(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1, 2)
    elsewhere = dataclasses.replace(Holder.this_process("was killed", 0.0), space="another host")
    (tmp_path / "writer.lock").write_bytes(elsewhere.to_bytes(1, 0.0))
    slept: list[float] = []
    monkeypatch.setattr(writing_verbs.time, "sleep", slept.append)
    code, _, err = said("prune", tmp_path, "--keep-latest", 1)
    waits, takes_over = [line for line in err.splitlines() if line.startswith("note: ")]
    assert waits == f"note: a silent job has {tmp_path}; waiting up to 30 s to see whether it lives"
    assert takes_over.startswith(f"note: Taking over {tmp_path} from run was killed ")
    assert code == 0 and sum(slept) >= 30
    assert names(tmp_path) == ["step-2"]


def test_what_a_killed_prune_left_is_removed_by_the_next_one(tmp_path: Path, said: Said) -> None:
    store = fill(tmp_path, 1, 2)
    store.discard(store.get(1))
    assert names(tmp_path) == [".trash-step-1-1", "step-2"]
    code, _, err = said("prune", tmp_path, "--keep-latest", 1)
    assert code == 0 and "note: .trash-step-1-1" in err
    assert names(tmp_path) == ["step-2"]


@pytest.mark.promise("A kill of `prune`, `pin` or `bring-back` at any operation loses nothing.", section="kept")
def test_a_prune_that_is_cut_anywhere_loses_nothing_that_is_kept(tmp_path: Path) -> None:
    for at in range(1, 200):
        root = tmp_path / str(at)
        fill(root, 1, 2, 3, 4, 5)
        pin(root, 2)
        kept = {step: contents(root / f"step-{step}") for step in (2, 4, 5)}
        store = CheckpointStore(root, durable=Cut(at, power=True))
        housekeeping = Housekeeping(KeepLatest(2), ignore)
        try:
            housekeeping.remove([each.info for each in housekeeping.verdicts(store) if each.goes], store)
            store.recover()
        except Crash:
            found = {info.step: contents(info.path) for info in CheckpointStore(root).committed()}
            assert {step: found.get(step) for step in kept} == kept
            assert found.keys() <= {1, 2, 3, 4, 5}
            assert main(["prune", str(root), "--keep-latest", "2", "--json"]) == 0
            assert names(root) == ["pins.json", "step-2", "step-4", "step-5"]
        else:
            assert at > 10, "no operation was cut"
            return
    raise AssertionError("more operations than expected")


def test_a_checkpoint_that_the_disk_does_not_remove_is_named_and_the_exit_code_is_1(
    tmp_path: Path, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1, 2, 3)

    def refuse(self: CheckpointStore, info: Any) -> Any:
        if info.step == 1:
            raise OSError(5, "Input/output error", str(info.path))
        return discard(self, info)

    discard = CheckpointStore.discard
    monkeypatch.setattr(CheckpointStore, "discard", refuse)
    code, out, _ = said("prune", tmp_path, "--keep-latest", 1)
    assert code == 1 and "could not be removed" in out and "1 of 3 checkpoints removed" in out
    assert names(tmp_path) == ["step-1", "step-3"]


def test_no_metric_is_noted(tmp_path: Path, said: Said) -> None:
    fill(tmp_path, 1, 2)
    code, out, err = said("prune", tmp_path, "--keep-best", 1, "--metric", "val")
    assert code == 0 and "no checkpoint records the metric 'val'" in err
    assert "kept: no val to compare" in out and names(tmp_path) == ["step-1", "step-2"]


def test_the_screen_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 123456789, metrics={"validation/loss": 1.0}, created_at=4e9)
    pin(tmp_path, 123456789)
    verb = Prune(str(tmp_path), 1, 1, 1, "validation/loss", 24.0, dry_run=True)
    verb.run(Screen(width=80))
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize(
    "argv",
    [
        ["prune", "{root}", "--keep-latest", "1"],
        ["pin", "{root}:2"],
        ["unpin", "{root}:2"],
        ["bring-back", "{root}", "step-1.corrupt"],
    ],
    ids=lambda argv: argv[0],
)
def test_neither_torch_nor_numpy_is_loaded(tmp_path: Path, argv: list[str]) -> None:
    fill(tmp_path, 1, 2).quarantine(1, ["a byte"])
    looks = (
        "import sys; from torchtitan_lite.cli.app import main; code = main(sys.argv[1:]);"
        "print(code, [name for name in ('torch', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    command = [sys.executable, "-c", looks, *(word.format(root=tmp_path) for word in argv)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=True)
    assert done.stderr == "0 []\n"
