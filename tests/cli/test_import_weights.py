"""`import-weights`: weights of other software as a checkpoint; complete, or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.checkpoint.importing.sources import (
    ARGS,
    State,
    in_their_names,
    weights,
    write_config,
    write_folder,
    write_meta,
    write_shards,
)
from tests.checkpoint.only_once import load_and_close
from tests.cli.command import ROOT, command, on_a_terminal, plain
from tests.cli.conftest import Said
from tests.examples import mostly_exhaustive
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.resume.evaluation import load_model
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.models.llama.model import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def of_checkpoint(out: Path) -> State:
    """Return the model of the checkpoint `out`."""
    model = Transformer(ARGS)
    load_model(model, out)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_a_folder_becomes_a_checkpoint_with_the_command_that_trains_from_it(tmp_path: Path, said: Said) -> None:
    state, source, out = weights(), tmp_path / "hf", tmp_path / "step-0"
    write_folder(source, state)
    code, printed, err = said("import-weights", source, out)
    assert (code, err) == (0, "")
    assert printed == (
        f"Imported 21 tensors of {source}\nto {out}: 135.6 KiB in 1 file\nTrain from it with\n"
        f"  python train.py --checkpoint.enable_checkpoint \\\n    --checkpoint.initial_load_path={out} \\\n"
        f"    --model.config_path={source}\n"
    )
    assert all(torch.equal(tensor, state[name]) for name, tensor in of_checkpoint(out).items())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_json_has_what_a_script_needs(tmp_path: Path) -> None:
    theirs = in_their_names(weights())
    del theirs["lm_head.weight"]
    write_config(tmp_path / "hf", tie_word_embeddings=True)
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    safetensors.torch.save_file(theirs, tmp_path / "hf" / "model.safetensors")
    out = tmp_path / "out"
    ended = command("import-weights", tmp_path / "hf", out, "--json", "--dtype", "bfloat16", "--files", "2")
    assert (ended.code, ended.err) == (0, "")
    assert ended.json["files"] == ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"]
    assert (ended.json["dtype"], ended.json["tensors"], ended.json["bytes"]) == ("bfloat16", 20, 50240)
    assert [note.partition(":")[0] for note in ended.json["notes"]] == ["tied embeddings"]
    assert ended.json["model"]["ffn_dim"] == 48
    assert ended.json["train"].endswith(f"--model.tokenizer_path={tmp_path / 'hf'}")


@pytest.mark.parametrize(("dtype", "stored"), [("same", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_floating_point_tensors_are_cast_and_others_are_not(dtype: str, stored: str, tmp_path: Path) -> None:
    tensors = {"w": torch.full((2, 2), 1.5, dtype=torch.float16), "n": torch.arange(3)}
    torch.save(tensors, tmp_path / "w.pt")
    ended = command("import-weights", tmp_path / "w.pt", tmp_path / "out", "--names", "same", "--dtype", dtype)
    assert (ended.code, ended.err) == (0, "")
    found = open_checkpoint(tmp_path / "out").contents.tensors
    assert {name: str(tensor.dtype) for name, tensor in found.items()} == {"model.w": stored, "model.n": "int64"}


def test_a_loop_of_a_persons_own_starts_from_it(tmp_path: Path) -> None:
    theirs = torch.nn.Linear(3, 2)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "w.ckpt")
    ended = command("import-weights", tmp_path / "w.ckpt", tmp_path / "start", "--names", "same")
    assert ended.out.splitlines()[2:] == [
        "Note: the weights are the entry 'state_dict' of w.ckpt",
        f"Start your loop from it with initial_load_path='{tmp_path / 'start'}'",
    ]
    model = torch.nn.Linear(3, 2)
    manager = CheckpointManager.for_loop(
        model=model, folder=tmp_path / "run", initial_load_path=str(tmp_path / "start"), preemption_signals=()
    )
    load_and_close(manager)
    assert torch.equal(model.weight, theirs.weight)


def test_a_run_in_the_folder_resumes_from_a_step_0_that_was_imported_there(tmp_path: Path) -> None:
    theirs = torch.nn.Linear(3, 2)
    torch.save(theirs.state_dict(), tmp_path / "w.pt")
    assert command("import-weights", tmp_path / "w.pt", tmp_path / "run" / "step-0", "--names", "same").code == 0
    model = torch.nn.Linear(3, 2)
    with CheckpointManager.for_loop(model=model, folder=tmp_path / "run", preemption_signals=()) as manager:
        assert manager.load()
        assert manager.loaded_step == 0
    assert torch.equal(model.weight, theirs.weight)


NAMES = '{"linear.weight": "w", "linear.bias": "b", "": ["old"]}'
FUNCTION = "def name(source):\n    return {'w': 'linear.weight', 'b': 'linear.bias'}.get(source)\n"


@pytest.mark.parametrize("given", ["names.json", "their_names:name"])
def test_names_come_from_a_file_or_a_function(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "their_names", raising=False)
    Path("names.json").write_text(NAMES)
    Path("their_names.py").write_text(FUNCTION)
    torch.save({"w": torch.ones(2), "b": torch.zeros(2), "old": torch.ones(1)}, "w.pt")
    ended = command("import-weights", "w.pt", "out", "--name-map", given)
    assert (ended.code, ended.err) == (0, "")
    assert sorted(open_checkpoint(tmp_path / "out").contents.tensors) == ["model.linear.bias", "model.linear.weight"]


@pytest.mark.parametrize(
    ("names", "finding"),
    [
        ('{"a": "w"}', 'the name map has nothing for b, old of w.pt; list what to leave out under ""'),
        ('{"a": "w", "b": "b", "c": "nowhere", "": ["old"]}', "w.pt does not have nowhere, which the name map names"),
        ('{"a": 1}', "the name map: expected"),
        ("[]", "--name-map names.json: expected"),
        ("{", "--name-map names.json: expected"),
    ],
)
def test_a_name_map_that_does_not_fit_is_refused(
    names: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("names.json").write_text(names)
    torch.save({"w": torch.ones(2), "b": torch.zeros(2), "old": torch.ones(1)}, "w.pt")
    ended = command("import-weights", "w.pt", "out", "--name-map", "names.json")
    assert (ended.code, ended.out) == (2, "")
    assert finding in ended.err
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("{}[source]", "the name map raised KeyError for w: 'w'"),
        ("7", "the name map returned 7 for w: expected a name, or None"),
        ("''", "the name map returned '' for w: expected a name, or None"),
        ("'same'", "the name map gives b and w the same name, same"),
        ("None", "w.pt: the name map leaves out every tensor"),
    ],
)
def test_a_function_of_names_that_fails_is_refused_with_what_it_did(
    body: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_names", raising=False)
    Path("failing_names.py").write_text(f"def name(source):\n    return {body}\n")
    torch.save({"w": torch.ones(2), "b": torch.zeros(2)}, "w.pt")
    ended = command("import-weights", "w.pt", "out", "--name-map", "failing_names:name")
    assert (ended.code, ended.out, ended.err) == (2, "", f"error: {finding}\n")


@pytest.mark.parametrize("given", ["names.txt", "no_such_module:name", "json:no_such_name", "sys:path"])
def test_a_name_map_that_is_none_is_refused(given: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    ended = command("import-weights", tmp_path / "w.pt", tmp_path / "out", "--name-map", given)
    assert ended.code == 2
    assert ended.err.startswith(f"error: --name-map {given}: ")


def test_one_sentence_and_an_exit_code_for_every_refusal(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "hf", weights())
    write_folder(tmp_path / "qwen", weights(), model_type="qwen2")
    write_folder(tmp_path / "int4", weights(), quantization_config={"quant_method": "gptq"})
    write_folder(tmp_path / "alone", weights())
    (tmp_path / "alone" / "config.json").unlink()
    shards = write_shards(tmp_path / "shards", in_their_names(weights()))
    (shards / "model-00002-of-00003.safetensors").unlink()
    meta = write_meta(tmp_path / "meta", weights(), 2, embeddings_by_columns=False)
    (meta / "consolidated.01.pth").unlink()
    torch.save({"w": torch.nn.Linear(1, 1)}, tmp_path / "unsafe.pt")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    out = tmp_path / "out"
    for code, arguments, finding in (
        (1, (tmp_path / "nowhere", out), "does not exist; a name on a hub is not downloaded"),
        (2, ("hf://org/name", out), "is an address, and import-weights works only on folders on disk"),
        (2, (tmp_path / "qwen", out), "found 'qwen2'; a training loop of your own"),
        (2, (tmp_path / "int4", out), "is quantized (gptq): import the weights that it was made from"),
        (2, (tmp_path / "alone", out), "there is no config.json in"),
        (3, (shards, out), "these are missing: model-00002-of-00003.safetensors. Download them"),
        (2, (meta, out), "is a file consolidated.NN.pth missing?"),
        (3, (tmp_path / "unsafe.pt", out, "--names", "same"), "it asks for torch.nn.modules.linear.Linear"),
        (2, (source, tmp_path / "there"), "exists: remove it, or name another OUT"),
        (2, (source, tmp_path / "step-5"), "is the name of step 5, and imported weights are step 0: name OUT step-0"),
        (2, (source, out, "--files", "100000"), "the tensors are too small for 100000 files: ask for at most"),
        (2, (source, out, "--names", "same", "--name-map", "a.json"), "--names same and --name-map: expected only one"),
        (2, (source, out, "--files", "-1"), "--files -1: expected at least 1"),
        (2, (source, out, "--dtype", "int8"), "--dtype: expected one of float32, "),
    ):
        ended = command("import-weights", *arguments)
        assert (ended.code, ended.out) == (code, ""), arguments
        assert ended.err.startswith("error: ")
        assert finding in ended.err, ended.err
        assert ended.err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == []


KILLED = """
import os, signal, sys
from torchtitan_lite.converting import dcp_folder
def die(*arguments): os.kill(os.getpid(), signal.SIGKILL)
setattr(dcp_folder, sys.argv[1], die)
from torchtitan_lite.cli.app import main
main(["import-weights", *sys.argv[2:]])
"""


@pytest.mark.slow  # Processes that import torch: 3 s each.
@pytest.mark.parametrize(
    "where", mostly_exhaustive(["write_new", "read_back", "_check_dcp_folder"], kept=["read_back"])
)
def test_a_killed_import_leaves_nothing_at_out_and_the_next_one_cleans_up(where: str, tmp_path: Path) -> None:
    source, out = write_folder(tmp_path / "hf", weights()), tmp_path / "step-0"
    code = [sys.executable, "-c", KILLED, where, str(source), str(out)]
    ended = subprocess.run(code, cwd=ROOT, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-0.unfinished", "hf"]
    assert command("import-weights", source, out).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "step-0"]


@pytest.mark.slow  # A process that imports torch, and 400 MB.
def test_kill_9_at_any_time_leaves_nothing_or_all_of_it(tmp_path: Path) -> None:
    tensors = {f"w{number}": torch.zeros(5_000_000) for number in range(20)}
    safetensors.torch.save_file(tensors, tmp_path / "w.safetensors")
    out = tmp_path / "out"
    words = ["import-weights", str(tmp_path / "w.safetensors"), str(out), "--names", "same", "--json"]
    for seconds in (0.0, 0.1, 0.3):
        with subprocess.Popen([sys.executable, "-m", "torchtitan_lite.cli", *words], cwd=ROOT) as process:
            unfinished = tmp_path / ".out.unfinished" / "__0_0.distcp"
            while not unfinished.exists() and process.poll() is None:
                time.sleep(0.005)
            time.sleep(seconds)
            os.kill(process.pid, signal.SIGKILL)
        assert not out.exists() or command("verify", out).code == 0
        if out.exists():
            break
    if not out.exists():
        assert command(*words).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "w.safetensors"]


@pytest.mark.slow  # A process that imports torch.
def test_lines_fit_a_terminal_of_80_columns_but_for_paths(tmp_path: Path) -> None:
    write_folder(tmp_path / "hf", weights())
    before = Path.cwd()
    os.chdir(tmp_path)
    try:
        code, screen = on_a_terminal("import-weights", "hf", "step-0")
        _, help_text = on_a_terminal("import-weights", "--help")
    finally:
        os.chdir(before)
    assert code == 0
    assert plain(screen).splitlines()[:2] == ["Imported 21 tensors of hf", "to step-0: 135.6 KiB in 1 file"]
    assert max(map(len, plain(screen).splitlines())) <= 80
    options = plain(help_text).partition("positional arguments")[2].splitlines()[1:]
    assert max(map(len, options)) <= 80


def test_a_folder_without_weights_is_one_sentence_that_says_what_is_there(tmp_path: Path, said: Said) -> None:
    (tmp_path / "hub" / "snapshots").mkdir(parents=True)
    code, out, err = said("import-weights", tmp_path / "hub", tmp_path / "out")
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {tmp_path}/hub holds no checkpoint: there are no weights in it: expected ")
    assert err.endswith("; it has snapshots\n")


def test_no_first_step_is_put_before_the_steps_of_a_run(tmp_path: Path, said: Said) -> None:
    write_folder(tmp_path / "hf", weights())
    torch.manual_seed(0)
    with CheckpointManager.for_loop(model=torch.nn.Linear(2, 2), folder=tmp_path / "run", interval=1) as manager:
        manager.load()
        manager.save(3)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    code, printed, err = said("import-weights", tmp_path / "hf", tmp_path / "run" / "step-0")
    assert (code, printed) == (2, "")
    assert f"{tmp_path}/run has step 3 of a run, which would not start from the imported weights" in err
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
