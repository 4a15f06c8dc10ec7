"""`.metadata` is written in a form that every supported version of torch reads, whichever wrote it."""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from tests.checkpoint.format.pickled import metadata_bytes
from tests.checkpoint.small_run import job_config
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.cli.app import main

FIELDS = {
    "Metadata": {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    "TensorStorageMetadata": {"properties", "size", "chunks"},
    "BytesStorageMetadata": set(),
    "ChunkStorageMetadata": {"offsets", "sizes"},
    "MetadataIndex": {"fqn", "offset", "index"},
    "_StorageInfo": {"relative_path", "offset", "length"},
    "StorageMeta": {"checkpoint_id", "save_id", "load_id", "modules"},
}
"""The fields of DCP's classes in torch 2.11."""


class Properties:
    """`TensorProperties` of torch 2.11 to 2.14, which take a state of five fields only."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, self.memory_format, self.pin_memory = state


def of_2_11(name: str) -> type:
    """Return a stand-in for DCP's class `name` that takes only the fields that torch 2.11 knows."""

    def set_state(self: object, state: dict[str, Any]) -> None:
        unknown = state.keys() - FIELDS[name]
        assert not unknown, f"{name} of torch 2.11 has no {unknown}"
        vars(self).update(state)

    return type(name, (), {"__setstate__": set_state, "__hash__": object.__hash__})


STAND_INS: dict[str, type] = {"TensorProperties": Properties, **{name: of_2_11(name) for name in FIELDS}}


class OldUnpickler(pickle.Unpickler):
    """Unpickles with the classes of torch 2.11 in place of those of DCP."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("torch.distributed.checkpoint"):
            return STAND_INS.get(name) or super().find_class(module, name)
        return super().find_class(module, name)


def read_as_2_11(data: bytes) -> Any:
    return OldUnpickler(io.BytesIO(data)).load()


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A committed step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with CheckpointManager(None, model, optimizer, None, {}, job_config(tmp_path)) as manager:
        manager.save(1, force=True)
        folder: Path = tmp_path / "checkpoint" / "step-1"
    return folder


def test_the_classes_of_torch_2_11_read_the_metadata_of_a_save(step: Path) -> None:
    found = read_as_2_11((step / ".metadata").read_bytes())
    described = found.state_dict_metadata["model.weight"]
    assert (described.properties.dtype, described.size) == (torch.float32, torch.Size([2, 3]))
    assert not hasattr(described.properties, "strides")


@pytest.mark.parametrize(
    "verb", [("convert", "--layout", "dcp"), ("reshard", "--files", "2")], ids=lambda verb: verb[0]
)
def test_the_classes_of_torch_2_11_read_the_metadata_that_a_verb_writes(
    verb: tuple[str, ...], step: Path, tmp_path: Path
) -> None:
    assert main([verb[0], str(step), str(tmp_path / "made" / "step-1"), *verb[1:]]) == 0
    found = read_as_2_11((tmp_path / "made" / "step-1" / ".metadata").read_bytes())
    assert {each.properties.dtype for each in found.state_dict_metadata.values() if hasattr(each, "size")}


def test_the_running_torch_reads_it_as_its_own(step: Path) -> None:
    metadata = dcp.FileSystemReader(step).read_metadata()
    again = pickle.loads(metadata_bytes(metadata))
    assert again == metadata
    described = again.state_dict_metadata["model.bias"]
    assert isinstance(again, Metadata)
    assert isinstance(described, TensorStorageMetadata)
    assert described.properties == TensorProperties(dtype=torch.float32)
    state = {"model": {"weight": torch.zeros(2, 3)}}
    dcp.load(state, checkpoint_id=step)
    assert state["model"]["weight"].abs().sum() > 0


def test_its_parts_make_one_plain_pickle(step: Path) -> None:
    listing = io.StringIO()
    # Raises ValueError for a number of the memo that is given twice, or that stands for nothing.
    pickletools.dis((step / ".metadata").read_bytes(), out=listing)
    assert listing.getvalue().count("TensorStorageMetadata") == 1


def test_nothing_but_the_strides_differs_from_an_ordinary_pickle() -> None:
    properties = TensorProperties(dtype=torch.bfloat16)
    metadata = Metadata({"a": TensorStorageMetadata(properties, torch.Size([2]), [])}, version="1.0.0")
    if hasattr(properties, "strides"):
        assert len(metadata_bytes(metadata)) < len(pickle.dumps(metadata, protocol=2))
        assert pickle.loads(metadata_bytes(metadata)) == metadata
    else:
        assert metadata_bytes(metadata) == pickle.dumps(metadata, protocol=2)
