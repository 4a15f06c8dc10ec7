"""`diff` on equal, different, damaged, foreign and missing checkpoints: the screen, the JSON, the exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading.foreign_folders import of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun
from tests.cli.command import command, on_a_terminal, plain
from tests.cli.conftest import Said
from tests.cli.folders import of_newer_format
from tests.store.filled import flip

GOLDEN = Path(__file__).parents[1] / "golden" / "format-7" / "two-ranks"
COMMAND = "diff"


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """Return a copy of a checkpoint of two ranks."""
    return Path(shutil.copytree(GOLDEN / "checkpoint" / "step-7", tmp_path / "checkpoint" / "step-7"))


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with steps 1 and 2, without digests of tensors."""
    folder = tmp_path_factory.mktemp("run")
    with SmallRun(folder, interval=1) as run:
        run.train(2)
        of_2024(run, folder / "of-2024")
        of_0_3(run, folder / "of-0.3")
    return folder


def test_a_checkpoint_equals_itself_however_it_is_spelt(step: Path, call: Said) -> None:
    for a, b in ((step, f"{step.parent}:7"), (step.parent, f"{step.parent.parent}:latest")):
        code, out, err = call(a, b)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == f"A  {step}"
        assert out.splitlines()[-1] in ("The states are equal.", "Nothing else differs.")
    assert call(step, step, "--values")[1].splitlines()[-1] == "The states are equal."


def test_another_sharding_of_the_same_values_is_equal_and_its_origin_does_not_count(call: Said) -> None:
    a, b = GOLDEN.parent / "one-process" / "export" / "step-7", GOLDEN / "export" / "step-7"
    code, out, err = call(a, b, "--values")
    assert (code, err) == (0, "")
    assert "Where they come from, which does not count (A, B): 2\n" in out
    assert out.splitlines()[-1] == "The states are equal."


def test_two_steps_differ_in_objects_and_values(run_folder: Path, call: Said) -> None:
    code, out, err = call(f"{run_folder}:1", f"{run_folder}:2")
    assert (code, err) == (4, "")
    assert "Values of 40 tensors not compared: --values reads them." in out
    assert "  lr_scheduler.last_epoch                   1        2\n" in out
    code, out, err = call(f"{run_folder}:1", f"{run_folder}:2", "--values", "--json")
    assert (code, err) == (4, "")
    document = json.loads(out)
    assert document["equal"] is False
    assert document["objects"]["lr_scheduler.last_epoch"] == {"a": "1", "b": "2"}
    assert document["values"]["read"]["train_state.step"] == {
        "bitwise_equal": False,
        "max_abs": 1.0,
        "num_different": 1,
    }
    assert "model.first.weight" in document["values"]["different"]
    assert "model.counter" not in document["values"]["different"]


@pytest.mark.parametrize("digests", [("save",), ()])
def test_a_straight_run_and_a_resumed_one_are_equal_but_for_their_clocks(
    digests: tuple[str, ...], tmp_path: Path, call: Said
) -> None:
    with SmallRun(tmp_path / "straight", interval=1, digest_tensors=digests) as run:
        run.step()
        shutil.copytree(run.root, tmp_path / "resumed" / "checkpoint")
        run.train_state.run_seconds, run.train_state.productive_seconds = 60.0, 5.5
        run.train(3)
    (tmp_path / "resumed" / "checkpoint" / "writer.lock").unlink()
    with SmallRun(tmp_path / "resumed", seed=1, interval=1, digest_tensors=digests).resumed() as resumed:
        resumed.train_state.run_seconds, resumed.train_state.productive_seconds = 80.0, 5.25
        resumed.train(3)
    code, out, err = call(tmp_path / "straight", tmp_path / "resumed", "--values")
    assert (code, err) == (0, ""), out
    assert (
        "Clocks of the runs, which do not count: 2\n"
        "  train_state.productive_seconds   by 0.25 s\n"
        "  train_state.run_seconds          by 20 s\n"
    ) in out
    assert out.splitlines()[-1] == "The states are equal."
    code, out, _ = call(tmp_path / "straight", tmp_path / "resumed")
    assert (code, out.splitlines()[-1]) == (0, "The states are equal." if digests else "Nothing else differs.")
    assert ("  train_state.run_seconds          another digest\n" in out) == bool(digests)
    clocks = json.loads(call(tmp_path / "straight", tmp_path / "resumed", "--values", "--json")[1])["clocks"]
    assert clocks == ["train_state.productive_seconds", "train_state.run_seconds"]


def test_a_state_of_the_users_own_that_is_called_as_a_clock_counts(tmp_path: Path, call: Said) -> None:
    a = save_plain({"timer": {"run_seconds": torch.ones(())}}, tmp_path / "a")
    b = save_plain({"timer": {"run_seconds": torch.zeros(())}}, tmp_path / "b")
    code, out, _ = call(a, b, "--values")
    assert code == 4 and "Other values: 1\n  timer.run_seconds   by up to 1" in out


def test_atol_is_what_counts_as_equal(tmp_path: Path, call: Said) -> None:
    a = save_plain({"w": torch.ones(4), "x": torch.ones(4)}, tmp_path / "a")
    b = save_plain({"w": torch.ones(4) + 0.25, "x": torch.ones(4)}, tmp_path / "b")
    assert call(a, b)[0] == 0, "values are not compared"
    code, out, _ = call(a, b, "--values")
    assert code == 4
    assert "Other values: 1\n  w   by up to 0.25   4 elements\n" in out
    assert call(a, b, "--atol", "0.1")[0] == 4
    code, out, _ = call(a, b, "--atol", "0.25")
    assert code == 0
    assert "Values of 2 tensors read: 2 equal within 0.25." in out


def test_what_is_compared_by_digest_is_not_read(tmp_path: Path, call: Said) -> None:
    run = SmallRun(tmp_path, interval=1, digest_tensors=("save",)).finished(2)
    for file in run.root.glob("step-*/__0_0.distcp"):
        flip(file, 1)
    code, out, _ = call(f"{tmp_path}:1", f"{tmp_path}:2")
    assert code == 4 and "model.first.weight" in out and "another digest" in out
    code, out, _ = call(f"{tmp_path}:2", f"{tmp_path}:2", "--values")
    assert code == 0
    assert "Values of 42 tensors not read: equal by digest." in out
    code, out, err = call(f"{tmp_path}:1", f"{tmp_path}:2", "--values")
    assert (code, out) == (3, ""), "those with another digest are read, and the file is damaged"
    assert "step-1 is damaged: bytes 0 to " in err and err.count("\n") == 1


@pytest.mark.parametrize("name", ["of-2024", "of-0.3"])
def test_a_checkpoint_of_torchtitan_is_compared(name: str, run_folder: Path, call: Said) -> None:
    code, out, err = call(f"{run_folder}:2", run_folder / name, "--json")
    assert (code, err) == (4, "")
    document = json.loads(out)
    assert document["origin"]["written by"] == {"a": "torchtitan_lite", "b": "torchtitan"}
    assert any(key.startswith("rng.") for key in document["only_in_a"])
    if name == "of-2024":
        assert not any(key.startswith(("model.", "optimizer.")) for key in document["only_in_a"])
        assert not any(key.startswith("optimizer.") for key in document["objects"])


def test_checkpoints_without_a_common_name(tmp_path: Path, call: Said) -> None:
    a, b = save_plain({"w": torch.ones(4)}, tmp_path / "a"), save_plain({"v": torch.ones(4)}, tmp_path / "b")
    code, out, _ = call(a, b, "--values")
    assert code == 4
    assert "Only in A: 1\n  w   float32 [4]\n" in out and "Only in B: 1\n  v   float32 [4]\n" in out
    assert "The two have no name in common." in out


def test_long_lists_are_cut_on_the_screen_and_complete_in_json(tmp_path: Path, call: Said) -> None:
    a = save_plain({f"w{number}": torch.ones(1) for number in range(40)}, tmp_path / "a")
    b = save_plain({"w0": torch.ones(1)}, tmp_path / "b")
    assert "Only in A: 39\n" in call(a, b)[1]
    assert "  ... and 27 more; --json has all of them\n" in call(a, b)[1]
    assert len(json.loads(call(a, b, "--json")[1])["only_in_a"]) == 39


def test_long_names_fit_into_80_columns(tmp_path: Path) -> None:
    key = "model.layers.0._checkpoint_wrapped_module.feed_forward.experts.w0.weight"
    a = save_plain({key: torch.ones(2), "s": ("x" * 100,)}, tmp_path / "a")
    b = save_plain({key: torch.ones(2).half(), "s": ("y" * 100,)}, tmp_path / "b")
    code, screen = on_a_terminal("diff", a, b)
    assert code == 4
    lines = [line.rstrip() for line in plain(screen).splitlines()]
    assert lines[lines.index(f"  {key}") + 1] == "    float32 [2]   float16 [2]"
    assert max(map(len, lines[2:])) <= 80
    assert f"  {key}   float32 [2]   float16 [2]\n" in command("diff", a, b).out, "one line in a pipe"


def _damaged(step: Path) -> Path:
    flip(step / "manifest.json", 40)
    return step


def _cut(step: Path) -> Path:
    (step / "__0_0.distcp").write_bytes(b"short")
    return step


def _half(step: Path) -> Path:
    for name in ("manifest.json", ".metadata"):
        (step / name).unlink()
    return step


@pytest.mark.parametrize(
    ("make", "code", "text"),
    [
        (_damaged, 3, "step-7 is damaged: manifest.json: its own digest is not the"),
        (_cut, 3, "step-7 is damaged: __0_0.distcp: expected 85312 bytes, found 5"),
        (of_newer_format, 1, "manifest.json: it has format version 99, this version reads up to 7"),
        (_half, 1, "step-7 holds no checkpoint: there are files of tensors in it, but no .metadata"),
        (lambda step: step.rename(step.with_name("step-7.staging-0f3a")), 1, "a save into it is under way"),
        (lambda step: step.parent / "step-8", 1, "step-8 does not exist"),
        (lambda step: f"{step.parent}:8", 1, "(it has 7)"),
        (lambda step: "hdfs://bucket/run:7", 2, "'hdfs://bucket/run' is not the address of a folder"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    make: Callable[[Path], object], code: int, text: str, step: Path, tmp_path: Path, call: Said
) -> None:
    other = shutil.copytree(step, tmp_path / "other")
    broken = make(step)
    for pair in ((broken, other), (other, broken)):
        found = call(*pair)
        assert found[:2] == (code, "")
        assert found[2].startswith("error: ") and text in found[2] and found[2].count("\n") == 1


@pytest.mark.parametrize("atol", ["-1", "nan", "inf"])
def test_a_tolerance_that_is_none_is_wrong_usage(atol: str, step: Path, call: Said) -> None:
    code, _, err = call(step, step, f"--atol={atol}")
    assert (code, err) == (2, f"error: --atol: expected a number of at least 0, found {float(atol)}\n")


def test_a_checkpoint_that_is_removed_meanwhile_is_one_sentence(
    step: Path, tmp_path: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchtitan_lite.cli import diff

    def purge_and_compare(a: Any, b: Any) -> Any:
        found = compare(a, b)
        shutil.rmtree(step)
        return found

    compare = diff.compare_checkpoints
    monkeypatch.setattr(diff, "compare_checkpoints", purge_and_compare)
    other = shutil.copytree(step, tmp_path / "other")
    code, out, err = call(step, other, "--values")
    assert (code, out) == (1, "")
    assert err == f"error: {step} holds no checkpoint: it was removed or replaced while it was read\n"
