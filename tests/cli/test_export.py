"""`export`: the weights of any checkpoint as safetensors, a torch file or a DCP folder; complete, or not there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.converting.sources import sharded_weights
from tests.checkpoint.reading.foreign_folders import of_0_3, of_2024, save_plain
from tests.checkpoint.small_run import SmallRun
from tests.checkpoint.state.low_bits import EightBits
from tests.cli.conftest import Said
from tests.cli.folders import of_newer_format
from tests.store.filled import flip
from torchtitan_lite.checkpoint import CheckpointManager
from torchtitan_lite.cli.export import num_bytes
from torchtitan_lite.converting import exporting
from torchtitan_lite.errors import ConfigError

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
STEP = GOLDEN / "format-7" / "two-ranks" / "checkpoint" / "step-7"
FORMATS = ("safetensors", "torch", "dcp")
State = dict[str, torch.Tensor]
COMMAND = "export"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """Return the dump folder of a small run with step 2, and its model."""
    folder = tmp_path_factory.mktemp("small")
    with SmallRun(folder).loaded() as run:
        run.train(2)
        model = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        of_0_3(run, folder / "of_0_3")
        of_2024(run, folder / "of_2024")
        save_plain({"model": run.model.state_dict(), "optimizer": {"x": torch.zeros(2)}}, folder / "nested")
        save_plain(dict(run.model.state_dict()), folder / "bare")
        save_plain({"app": {"model": run.model.state_dict(), "optim": {"x": torch.zeros(2)}}}, folder / "tutorial")
        named = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
        save_plain(named, folder / "named_model")
    return folder, model


def loaded(out: Path, format: str, like: State) -> State:
    """Return what `out` holds, by the format's own library."""
    if format == "torch":
        state: State = torch.load(out, weights_only=True)
        return state
    if format == "dcp":
        state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        dcp_load(state, checkpoint_id=out, no_dist=True)
        return state
    return {name: t for file in out.glob("*.safetensors") for name, t in safetensors.torch.load_file(file).items()}


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert [name for name, tensor in expected.items() if found[name].dtype != tensor.dtype] == []


def cast(model: State, dtype: torch.dtype) -> State:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.items()}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", ["checkpoint/step-2", "of_0_3", "of_2024", "nested", "bare", "tutorial"])
def test_the_weights_of_any_checkpoint_in_any_format(
    source: str, format: str, small: tuple[Path, State], tmp_path: Path, call: Said
) -> None:
    folder, model = small
    code, out, err = call(folder / source, tmp_path / "out", "--format", format, "--dtype", "bfloat16")
    assert (code, err) == (0, "")
    assert out.startswith(f"Exported {len(model)} tensors of {folder / source}\nto {tmp_path / 'out'}: ")
    expected = cast(model, torch.bfloat16)
    assert_equal(loaded(tmp_path / "out", format, expected), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_names_of_the_model_that_begin_with_model_are_kept(
    small: tuple[Path, State], tmp_path: Path, call: Said
) -> None:
    folder, model = small
    assert call(folder / "named_model", tmp_path / "out")[0] == 0
    assert_equal(loaded(tmp_path / "out", "safetensors", {}), {f"model.{name}": t for name, t in model.items()})


@pytest.mark.parametrize("kind", ["checkpoint", "export"])
@pytest.mark.parametrize("writers", ["one-process", "two-ranks"])
def test_a_golden_checkpoint_is_exported(writers: str, kind: str, tmp_path: Path, call: Said) -> None:
    step = GOLDEN / "format-7" / writers / kind / "step-7"
    assert call(step, tmp_path / "m.pt", "--format", "torch")[0] == 0
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    prefix = "model." if kind == "checkpoint" else ""
    expected = {prefix + name: torch.zeros_like(tensor) for name, tensor in found.items()}
    dcp_load(expected, checkpoint_id=step, no_dist=True)
    assert_equal(found, {name.removeprefix(prefix): tensor for name, tensor in expected.items()})
    assert {*found} == {"weight", "brief", "turned", "scale", "nothing", "count", "mask"}


@pytest.mark.parametrize("spelling", ["", "checkpoint", "checkpoint/step-2", "checkpoint:2", "checkpoint:latest"])
def test_a_step_however_it_is_spelt(spelling: str, small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    folder, _ = small
    target = f"{folder}/{spelling}" if spelling else f"{folder}/checkpoint"
    code, out, _ = call(target, tmp_path / "out", "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["step"], found["source"]) == (2, str(folder / "checkpoint" / "step-2"))
    assert found["files"] == ["model.safetensors"]


def test_shards_have_an_index_and_are_not_larger_than_asked(tmp_path: Path, call: Said) -> None:
    folder, tensors = sharded_weights(tmp_path / "c")
    code, out, _ = call(folder, tmp_path / "out", "--max-shard-size", "7KB", "--json")
    assert code == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {*json.loads(out)["files"]} == {path.name for path in (tmp_path / "out").iterdir()}
    found: State = {}
    for name, file in index["weight_map"].items():
        found |= {name: safetensors.torch.load_file(tmp_path / "out" / file)[name]}
    assert_equal(found, tensors)


def test_one_file_where_out_is_named_like_one(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    folder, model = small
    assert call(folder, tmp_path / "w.safetensors")[0] == 0
    assert_equal(safetensors.torch.load_file(tmp_path / "w.safetensors"), model)
    code, _, err = call(folder, tmp_path / "v.safetensors", "--max-shard-size", "1MB")
    assert (code, err) == (2, f"error: {tmp_path}/v.safetensors is one file, and --max-shard-size makes several: "
                              "name a folder as OUT\n")  # fmt: skip


def test_globs_choose_names(small: tuple[Path, State], tmp_path: Path, call: Said) -> None:
    folder, model = small
    assert call(folder, tmp_path / "out", "--include", "first.*,norm.*", "--exclude", "*.bias")[0] == 0
    expected = {n: t for n, t in model.items() if n.startswith(("first.", "norm.")) and not n.endswith(".bias")}
    assert_equal(loaded(tmp_path / "out", "safetensors", {}), expected)
    code, _, err = call(folder, tmp_path / "other", "--exclude", "frist.*")
    assert (code, err) == (2, "error: --exclude 'frist.*' matches no tensor of the model, such as counter\n")


def test_a_dtype_that_the_format_lacks_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, call: Said
) -> None:
    save_plain({"fine": torch.zeros(2), "odd": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "c")
    code, _, err = call(tmp_path / "c", tmp_path / "out")
    assert code == 2
    assert err.startswith("error: safetensors has no such dtype: odd (complex128); use --format torch or dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert call(tmp_path / "c", tmp_path / "out", "--exclude", "odd")[0] == 0


def test_extra_state_goes_into_torch_and_dcp_and_is_refused_by_safetensors(tmp_path: Path, call: Said) -> None:
    state: dict[str, Any] = {"w": torch.ones(2), "q._extra_state": {"scale": torch.ones(3), "steps": [1, 2]}}
    save_plain({"model": state, "optimizer": {"x": torch.zeros(2)}}, tmp_path / "c")
    assert call(tmp_path / "c", tmp_path / "m.pt", "--format", "torch")[0] == 0
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found["q._extra_state"]["steps"] == [1, 2]
    assert torch.equal(found["q._extra_state"]["scale"], torch.ones(3))
    assert call(tmp_path / "c", tmp_path / "d", "--format", "dcp")[0] == 0
    code, _, err = call(tmp_path / "c", tmp_path / "s")
    assert (code, err.partition(",")[0]) == (2, "error: q._extra_state.steps is no tensor")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_an_out_that_exists_is_refused_unless_it_is_an_empty_folder(
    format: str, small: tuple[Path, State], tmp_path: Path, call: Said
) -> None:
    folder, _ = small
    out = tmp_path / "out"
    out.mkdir()
    assert call(folder, out, "--format", format)[0] == (2 if format == "torch" else 0)
    (out / "mine").touch()
    code, _, err = call(folder, out, "--format", format)
    found = "expected a new folder, found a checkpoint: name a folder that does not exist yet"
    assert (code, err.count("\n")) == (2, 1)
    assert err[7:-1] in (f"{out} exists: remove it, or name another OUT", f"OUT {out}: {found}")
    assert (out / "mine").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_damage_is_found_and_nothing_remains(format: str, tmp_path: Path, call: Said) -> None:
    folder, _ = sharded_weights(tmp_path / "c")
    flip(next(folder.glob("*.distcp")), 700_000)
    code, out, err = call(folder, tmp_path / "out", "--format", format)
    assert (code, out) == (3, "")
    assert err.startswith(f"error: {folder} is damaged: bytes ")
    assert "(in it: tok.weight" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (shutil.rmtree, 1, "does not exist"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], 1, "there is no complete checkpoint in it"),
        (
            lambda folder: [(folder / n).unlink() for n in ("manifest.json", ".metadata")],
            1,
            "there are files of tensors in it, but no .metadata",
        ),
        (lambda folder: os.truncate(folder / "__1_0.distcp", 400), 3, "is damaged: __1_0.distcp: expected 24896 bytes"),
        (lambda folder: (folder / "__1_0.distcp").unlink(), 3, "is damaged: __1_0.distcp is missing"),
        (lambda folder: flip(folder / "manifest.json", 40), 3, "is damaged: manifest.json"),
        (of_newer_format, 1, "it has format version 99, this version reads up to 7"),
    ],
    ids=["nothing", "empty", "half-written", "cut", "missing", "manifest", "newer"],
)
def test_what_is_no_complete_checkpoint_is_one_sentence(
    change: Callable[[Path], object], code: int, text: str, tmp_path: Path, call: Said
) -> None:
    folder = tmp_path / "step-7"
    shutil.copytree(STEP, folder)
    change(folder)
    found, out, err = call(folder, tmp_path / "out")
    assert (found, out) == (code, "")
    assert text in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_wrong_usage_is_one_sentence(tmp_path: Path, call: Said) -> None:
    for arguments in (
        ("hdfs://bucket/run:7", "out"),
        (STEP, "s3://bucket/out"),
        (STEP, tmp_path / "out", "--max-shard-size", "many"),
        (STEP, tmp_path / "out", "--format", "torch", "--max-shard-size", "1GB"),
        (STEP, tmp_path / "out", "--format", "npz"),
        (STEP,),
    ):
        code, out, err = call(*arguments)
        assert (code, out, err.count("\n"), err[:7]) == (2, "", 1, "error: "), arguments


def test_a_foreign_folder_is_one_sentence(tmp_path: Path, call: Said) -> None:
    (tmp_path / "notes.txt").touch()
    code, _, err = call(tmp_path, tmp_path / "out")
    assert (code, err) == (1, f"error: {tmp_path} holds no checkpoint: there is no complete checkpoint in it\n")
    save_plain({"optimizer": {"x": torch.zeros(2)}, "other": {"y": torch.zeros(2)}}, tmp_path / "c")
    code, _, err = call(tmp_path / "c", tmp_path / "out")
    assert code == 1
    assert "there is no model in it: expected a state 'model' or weights at the top, found optimizer, other" in err


def test_a_missing_library_is_one_sentence(
    small: tuple[Path, State], tmp_path: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    code, _, err = call(small[0], tmp_path / "out")
    assert (code, err) == (
        1,
        "error: safetensors is not installed. Install it with: pip install 'torchtitan-lite[safetensors]'\n",
    )
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("is_replaced", [False, True], ids=["removed", "replaced"])
def test_a_step_that_is_gone_meanwhile_is_one_sentence(
    is_replaced: bool, tmp_path: Path, call: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = sharded_weights(tmp_path / "step-1")
    opened = exporting.TensorStream

    def gone(*arguments: Any) -> Any:
        stream = opened(*arguments)
        new = shutil.copytree(folder, tmp_path / "new")
        for path in new.glob("*.distcp"):
            path.write_bytes(bytes(path.stat().st_size))
        shutil.rmtree(folder)
        if is_replaced:
            new.rename(folder)
        else:
            shutil.rmtree(new)
        return stream

    monkeypatch.setattr(exporting, "TensorStream", gone)
    code, _, err = call(folder, tmp_path / "out")
    assert code == 1
    assert err == (f"error: {folder} holds no checkpoint: it was removed or replaced while it was read\n")
    assert [*tmp_path.iterdir()] == ([folder] if is_replaced else [])


def test_without_a_cast_no_torch_is_imported(small: tuple[Path, State], tmp_path: Path) -> None:
    script = (
        "import sys; from torchtitan_lite.cli.app import main\n"
        "code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, "export", str(small[0]), str(tmp_path / "out")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.slow  # Two processes.
def test_a_killed_export_leaves_no_out_and_the_next_one_clears_up(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save_plain({"w": torch.zeros(64 << 20)}, tmp_path / "c")
    command = [sys.executable, "-m", "torchtitan_lite.cli", "export", str(tmp_path / "c"), str(tmp_path / "out")]
    staging = tmp_path / ".out.unfinished"
    with subprocess.Popen(command, cwd=ROOT) as process:
        while not any(staging.glob("*")) and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert staging.exists()
    assert not (tmp_path / "out").exists()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert {path.name for path in tmp_path.iterdir()} == {"c", "out"}


def test_sizes_have_units() -> None:
    sizes = {"5GB": 5 * 10**9, "500MiB": 500 << 20, "1.5kb": 1500, "7": 7, "2 TiB": 2 << 40, "3G": 3 * 10**9}
    assert {text: num_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "0", "5 apples", "1e9"):
        with pytest.raises(ConfigError, match="is not a size"):
            num_bytes(text)


@pytest.mark.parametrize("format", FORMATS)
def test_the_parts_of_a_tensor_that_is_made_of_others_keep_their_dtypes(
    call: Said, tmp_path: Path, format: str
) -> None:
    model = torch.nn.Linear(8, 6)
    model.weight = torch.nn.Parameter(EightBits.of(model.weight), requires_grad=False)
    with CheckpointManager.for_loop(model=model, folder=tmp_path / "run") as manager:
        manager.save(1, now=True)
    out = tmp_path / f"out.{format}"
    assert call(tmp_path / "run", out, "--format", format, "--dtype", "bfloat16")[0] == 0
    parts = {"weight.codes": model.weight.codes, "weight.scale": model.weight.scale}
    if format == "safetensors":
        [file], found = [out], safetensors.torch.load_file(out)
        with safetensors.safe_open(file, framework="pt") as opened:
            assert "EightBits" in opened.metadata()["weight.__tensor_flatten__"]
    else:
        like = {**parts, "bias": model.bias.detach().bfloat16()}
        found = {name: each for name, each in loaded(out, format, like).items() if torch.is_tensor(each)}
    assert_equal(found, {**parts, "bias": model.bias.detach().bfloat16()})
