"""A model written for Hugging Face's libraries: by one process, or by several that each write some of the files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.checkpoint.reading.foreign_folders import save_plain
from tests.checkpoint.reading.memory import peak_above_before, untouched_zeros
from tests.hugging_face import write_model
from torchtitan_lite.converting import new_output
from torchtitan_lite.converting.streamed_file import Advance
from torchtitan_lite.errors import CheckpointUnreadable, ConfigError
from torchtitan_lite.examining.opened import OpenedCheckpoint, open_checkpoint
from torchtitan_lite.examining.tensor_stream import SLICE_BYTES
from torchtitan_lite.hugging_face.known_model import HuggingFaceModel
from torchtitan_lite.hugging_face.model_files import Place
from torchtitan_lite.hugging_face.writing import PlannedExport, plan, write_rest, write_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

State = dict[str, torch.Tensor]
MODEL = HuggingFaceModel(
    {"model_type": "llama", "dtype": "float64", "hidden_size": 4},
    {
        "wq": Place("q_proj.weight", (8, 4), 4),
        "wo": Place("o_proj.weight", (4, 8)),
        "count": Place("count", (2,)),
    },
    {"tokenizer.json": b"{}"},
)


@contextmanager
def silent(label: str, num_bytes: int) -> Iterator[Advance]:
    yield lambda num_bytes: None


@pytest.fixture
def tensors() -> State:
    return {"wq": torch.randn(8, 4), "wo": torch.randn(4, 8), "count": torch.tensor([1, 2])}


@pytest.fixture
def opened(tensors: State, tmp_path: Path) -> OpenedCheckpoint:
    state: dict[str, Any] = {"model": tensors, "optimizer": {"x": torch.zeros(2)}}
    save_plain(state, tmp_path / "step-3")
    return open_checkpoint(tmp_path / "step-3")


def theirs(tensors: State, dtype: torch.dtype = torch.float32) -> State:
    rows = torch.tensor([0, 2, 1, 3, 4, 6, 5, 7])
    return {
        "q_proj.weight": tensors["wq"][rows].to(dtype),
        "o_proj.weight": tensors["wo"].to(dtype),
        "count": tensors["count"],
    }


def loaded(out: Path) -> State:
    return {n: t for file in out.glob("*.safetensors") for n, t in safetensors.torch.load_file(file).items()}


def assert_equal(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert [name for name, tensor in expected.items() if found[name].dtype != tensor.dtype] == []


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_the_files_have_their_names_and_order_and_the_dtype_is_in_the_config(
    dtype: str, opened: OpenedCheckpoint, tensors: State, tmp_path: Path
) -> None:
    done = write_model(opened, MODEL, tmp_path / "out", silent, dtype=dtype)
    assert_equal(loaded(tmp_path / "out"), theirs(tensors, torch.bfloat16 if dtype else torch.float32))
    assert sorted(done.files) == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {*done.files} == {"model.safetensors", "config.json", "tokenizer.json", "README.md"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    after = dtype or "float32"
    assert config == {"model_type": "llama", "hidden_size": 4, "dtype": after, "torch_dtype": after}


def test_ranks_share_the_shards_and_the_coordinator_writes_the_rest(
    opened: OpenedCheckpoint, tensors: State, tmp_path: Path
) -> None:
    def planned_by_a_rank() -> PlannedExport:
        return plan(opened, MODEL, name="out", dtype="bfloat16", max_shard_bytes=64)

    with new_output.new_folder(tmp_path / "out") as folder:
        for rank in range(2):
            planned = planned_by_a_rank()
            write_shards(planned, folder, [*planned.shards][rank::2])
        write_rest(planned_by_a_rank(), folder)
    write_model(opened, MODEL, tmp_path / "alone" / "out", silent, dtype="bfloat16", max_shard_bytes=64)
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone" / "out").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == 2 * 64 + 16
    assert {*index["weight_map"].values()} == {name for name in files if name.endswith(".safetensors")}
    assert_equal(loaded(tmp_path / "out"), theirs(tensors, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"new": Place("new", (1,))}, "missing new"),
        ({"wo": Place("o_proj.weight", (8, 8))}, "wo has shape [4, 8], expected [8, 8]"),
        ({"wq": None}, "unexpected wq"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_name(
    change: dict[str, Place | None], finding: str, opened: OpenedCheckpoint, tmp_path: Path
) -> None:
    places = {name: place for name, place in {**MODEL.places, **change}.items() if place is not None}
    with pytest.raises(ConfigError) as raised:
        write_model(opened, dataclasses.replace(MODEL, places=places), tmp_path / "out", silent)
    assert str(raised.value).endswith(f"does not have the weights of the model that is described: {finding}")


def test_two_tensors_of_one_name_are_refused_and_nothing_is_written(opened: OpenedCheckpoint, tmp_path: Path) -> None:
    places = {**MODEL.places, "wo": Place("q_proj.weight", (4, 8))}
    with pytest.raises(ConfigError, match=r"model\.w[oq] and model\.w[oq] would both be q_proj\.weight"):
        write_model(opened, dataclasses.replace(MODEL, places=places), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def test_what_is_left_out_need_not_have_a_place(opened: OpenedCheckpoint, tensors: State, tmp_path: Path) -> None:
    places = {name: place for name, place in MODEL.places.items() if name != "count"}
    write_model(opened, HuggingFaceModel({}, places, {}, ["count"]), tmp_path / "out", silent)
    expected = theirs(tensors)
    del expected["count"]
    assert_equal(loaded(tmp_path / "out"), expected)


def test_nothing_remains_of_a_failure(opened: OpenedCheckpoint, tmp_path: Path) -> None:
    next(opened.folder.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointUnreadable):
        write_model(opened, MODEL, tmp_path / "out", silent)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


@pytest.mark.slow  # Writes and reads 500 MB.
@pytest.mark.parametrize("head_dim", [64, 8192], ids=["small heads", "heads larger than a slice"])
def test_the_memory_of_an_export_does_not_grow_with_the_tensors(head_dim: int, tmp_path: Path) -> None:
    save_plain({"model": {"wq": untouched_zeros(256 << 20).view(torch.float32).view(16_384, 4096)}}, tmp_path / "c")
    model = HuggingFaceModel({}, {"wq": Place("q_proj.weight", (16_384, 4096), head_dim)})
    opened = open_checkpoint(tmp_path / "c")
    peak = peak_above_before(lambda: write_model(opened, model, tmp_path / "out", silent, dtype="bfloat16"))
    assert peak < (128 << 20) + SLICE_BYTES
