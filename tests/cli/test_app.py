"""The command: usage, errors, exit codes, streams."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import CLI, ROOT, command, on_a_terminal, plain
from tests.cli.folders import add_step
from torchtitan_lite import errors
from torchtitan_lite.cli.app import VERBS
from torchtitan_lite.cli.exit_codes import ExitCode, code_of, sentence_of

USAGE = 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "no verb is given: expected one of ls, inspect"),
        (("--json", "ls"), "unrecognized options: --json; see torchtitan-lite --help"),
        (("--print-completion", "fish"), "--print-completion: expected one of bash, zsh, found 'fish'; see"),
        (("lss", "x"), "there is no verb 'lss', did you mean ls?"),
        (("frobnicate",), "there is no verb 'frobnicate': expected one of ls,"),
        (("ls",), "missing from torchtitan-lite ls: FOLDER; see torchtitan-lite ls --help"),
        (("ls", "a", "b"), "expected no further argument, found b; see torchtitan-lite ls --help"),
        (("inspect", "a", "--rank"), "unrecognized options: --rank; the nearest is --ranks; see"),
        (
            ("export", "a", "b", "--dtype", "int8"),
            "--dtype: expected one of float32, float16, bfloat16, found 'int8'; see",
        ),
        (("prune", "a", "--keep-latest", "x"), "--keep-latest: expected a whole number, found 'x'; see"),
        (("prune", "a", "--keep-for-hours", "x"), "--keep-for-hours: expected a number, found 'x'; see"),
        (("prune", "a", "--keep-latest"), "--keep-latest: expected a value, found none; see"),
        (("ls", "--x"), "unrecognized options: --x; see torchtitan-lite ls --help"),
        (("ls", "-x", "a"), "unrecognized options: -x; see torchtitan-lite ls --help"),
        (("ls", "--x", "a"), "unrecognized options: --x; see torchtitan-lite ls --help"),
        (
            ("verify", "--size", "a"),
            "unrecognized options: --size; the nearest is --sizes; see torchtitan-lite verify --help",
        ),
        (
            ("verify", "a", "--size"),
            "unrecognized options: --size; the nearest is --sizes; see torchtitan-lite verify --help",
        ),
        (("prune", "--keep_latest=x", "a"), "--keep-latest: expected a whole number, found 'x'; see"),
        (
            ("prune", "a", "--keep-every", "3", "--ttl-hours=2"),
            "unrecognized options: --keep-every, --ttl-hours; see torchtitan-lite prune --help",
        ),
        (("ls", "a", "--out", "b"), "unrecognized options: --out; see torchtitan-lite ls --help"),
        (("report", "a", "b"), "OUT b: expected a name that ends in .html; --compare-with names a second run"),
        (("ls", "--json"), "missing from torchtitan-lite ls: FOLDER; see torchtitan-lite ls --help"),
        (("ls", "--folder", "a"), "unrecognized options: --folder; see torchtitan-lite ls --help"),
        (
            ("ls", "hdfs://bucket/run"),
            "'hdfs://bucket/run' is not the address of a folder in an object store: expected",
        ),
        (("inspect", "s3://bucket:7"), "an address of a folder in an object store has a user, a password or a port"),
        (("memory", "gs://bucket/run"), "gs://bucket/run is an address, and memory works only on folders on disk"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) or "nothing",
)
def test_wrong_usage_is_one_sentence_and_exit_code_2(arguments: tuple[str, ...], sentence: str) -> None:
    ended = command(*arguments)
    assert (ended.code, ended.out) == (USAGE, "")
    assert ended.err.startswith(f"error: {sentence}")
    assert ended.err.count("\n") == 1


def test_help_lists_every_verb_in_80_columns() -> None:
    code, screen = on_a_terminal("--help")
    assert code == 0
    assert all(f"\n    {verb} " in plain(screen) for verb in VERBS)
    assert max(map(len, plain(screen).splitlines())) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        command(verb, "--help")
    assert not ending.value.code


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_can_complete_the_verbs(shell: str) -> None:
    done = subprocess.run([*CLI, "--print-completion", shell], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(verb in done.stdout for verb in VERBS)


def test_every_error_of_the_package_becomes_one_line_without_advice_for_a_job() -> None:
    found: dict[type[BaseException], tuple[BaseException, ExitCode]] = {
        type(error): (error, code)
        for error, code in (
            (errors.ConfigError("a is wrong."), ExitCode.USAGE),
            (errors.CheckpointNotFound("f", 3, [1, 2]), ExitCode.FAILED),
            (errors.CheckpointDamaged("f", "it is cut.", ["a", "b"]), ExitCode.DAMAGE),
            (errors.AllCheckpointsDamaged("f", {1: "cut", 2: "gone"}), ExitCode.DAMAGE),
            (errors.CheckpointUnsafe("f", "a link."), ExitCode.DAMAGE),
            (errors.CheckpointUnreadable("f", "OSError: EIO"), ExitCode.FAILED),
            (errors.FormatTooNew("f", 9, 3), ExitCode.FAILED),
            (errors.FolderInUse("f", "run x"), ExitCode.FAILED),
            (errors.LeaseLost("f", "run x"), ExitCode.FAILED),
            (errors.ExtraMissing("safetensors"), ExitCode.FAILED),
            (PermissionError(13, "Permission denied", "f"), ExitCode.FAILED),
        )
    }
    for error, code in found.values():
        sentence = sentence_of(pickle.loads(pickle.dumps(error)))
        assert code_of(error) == code
        assert "\n" not in sentence and not sentence.endswith("."), sentence
        assert "--checkpoint." not in sentence and "--job." not in sentence, sentence


def test_a_reader_that_ends_early_causes_no_message(tmp_path: Path) -> None:
    add_step(tmp_path / "checkpoint", 7)
    script = f"{sys.executable} -m torchtitan_lite.cli inspect {tmp_path} --json | head -c 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("{")


def test_an_interrupt_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchtitan_lite.cli.ls.folder_of_checkpoints", interrupted)
    ended = command("ls", tmp_path)
    assert (ended.code, ended.out, ended.err) == (130, "", "interrupted\n")


def test_listings_import_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """Of ours, of ours with another format, and of plain DCP; also with every option."""
    root = tmp_path / "checkpoint"
    add_step(root, 7)
    (add_step(root, 8) / "manifest.json").unlink()
    calls = [["ls", str(root)], ["ls", str(root), "--json"], ["ls", str(tmp_path)]]
    for step in (7, 8):
        calls += [["inspect", f"{root}:{step}"], ["inspect", f"{root}:{step}", "--tensors=*", "--ranks", "--json"]]
    script = (
        "import json, sys\nfrom torchtitan_lite.cli.app import main\n"
        f"codes = [main(call) for call in json.loads({json.dumps(json.dumps(calls))})]\n"
        "print(json.dumps([codes, sorted({'torch', 'numpy'} & set(sys.modules))]), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stderr) == [[0] * len(calls), []]


@pytest.mark.parametrize("columns", [80, 40])
def test_help_of_a_verb_fits_the_terminal(columns: int) -> None:
    code, screen = on_a_terminal("report", "--help", columns=columns)
    assert code == 0
    assert max(map(len, plain(screen).splitlines())) <= columns
    assert "nothing of it is changed" in " ".join(plain(screen).split())


def test_help_names_no_empty_choice_and_no_empty_default() -> None:
    _, screen = on_a_terminal("export", "--help")
    text = " ".join(plain(screen).split())
    assert "--dtype {float32,float16,bfloat16} " in text and "{," not in text and "default: ''" not in text
