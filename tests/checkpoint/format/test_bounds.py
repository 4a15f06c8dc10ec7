"""No byte moves between memory and a file before its box is known to be inside both."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.only_once import save_and_close
from tests.checkpoint.small_run import job_config
from torchtitan_lite.checkpoint.format.contents import Chunk
from torchtitan_lite.checkpoint.format.file_data import FileData, FileLayout
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.reading.reader import CheckpointReader
from torchtitan_lite.checkpoint.reading.regions import RankReads, Region, StoredBox
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.state.train_state import TrainState
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import CheckpointMismatch


class Run:
    """Three layers with AdamW after one step. The `width` of the first two may differ between runs."""

    def __init__(self, folder: Path, width: int, **checkpoint: Any) -> None:
        torch.manual_seed(width)
        self.model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2), nn.Linear(2, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.ones(4, 3)).sum().backward()
        self.optimizer.step()
        states = {"train_state": TrainState()}
        config = job_config(folder, **checkpoint)
        self.manager = CheckpointManager(None, [self.model], [self.optimizer], [], states, config)

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state[parameter]
            found |= {f"{name}.{key}": state[key] for key in ("exp_avg", "exp_avg_sq")}
        return {name: tensor.clone() for name, tensor in found.items()}


@pytest.mark.parametrize(("saved", "loaded"), [(8, 6), (6, 64)])
@pytest.mark.parametrize("strictness", ["warn", "ignore"])
def test_an_optimizer_state_of_another_shape_is_left_as_it_is_and_reported(
    tmp_path: Path, saved: int, loaded: int, strictness: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_and_close((first := Run(tmp_path, saved)).manager)
    second = Run(tmp_path, loaded, load_strictness=strictness, load_only=True)
    before, expected = second.tensors(), first.tensors()
    with second.manager as manager, caplog.at_level(logging.WARNING):
        assert manager.load()
    for name, tensor in second.tensors().items():
        fits = before[name].shape == expected[name].shape
        assert torch.equal(tensor, expected[name] if fits else before[name]), name
    assert [name for name in before if before[name].shape == expected[name].shape], "some of it is loaded"
    assert (f"optimizer.state.0.weight.exp_avg: shape [{saved}, 3]" in caplog.text) == (strictness == "warn")


@pytest.mark.parametrize("box", [((0, 0), (5, 2)), ((3, 0), (2, 2)), ((-1, 0), (1, 2)), ((0,), (4,))], ids=str)
def test_a_part_that_is_not_inside_its_source_is_refused(box: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source = StoredBox("file", 0, torch.float32, (4, 2), (2, 1))
    with pytest.raises(ValueError, match=r"is not inside \[4, 2\] of file"):
        source.part(*box)


@pytest.mark.parametrize(("offsets", "rows"), [((0, 0), 9), ((2, 0), 3), ((1, 0), 4)], ids=str)
def test_a_region_that_is_not_inside_its_chunk_is_refused_before_any_read(
    tmp_path: Path, offsets: tuple[int, ...], rows: int
) -> None:
    save_and_close(Run(tmp_path, 4).manager)
    path = tmp_path / "checkpoint" / "step-1"
    reader = CheckpointReader(path)
    [chunk] = StoredCheckpoint(path, Peers(timedelta(seconds=9))).contents.tensors["model.0.weight"].chunks
    assert isinstance(chunk, Chunk) and chunk.sizes == (4, 3)
    target, other = torch.full((rows, 3), 7.0), torch.full((4, 3), 7.0)
    regions = [Region("model.0.weight", chunk, (0, 0), other), Region("model.0.weight", chunk, offsets, target)]
    with pytest.raises(CheckpointMismatch, match=r"model\.0\.weight: .* is not inside a chunk of \[4, 3\]"):
        reader.read(RankReads(regions))
    assert bool((target == 7).all()) and bool((other == 7).all())


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(4, dtype=torch.float16), torch.zeros(2, 2)], ids=str)
def test_a_tensor_with_another_dtype_or_shape_than_in_the_plan_is_refused(other: torch.Tensor) -> None:
    layout = FileLayout([(torch.float32, (4,))])
    FileData(layout, [torch.zeros(4)])
    with pytest.raises(ValueError, match=r"where the plan has torch\.float32\[4\]"):
        FileData(layout, [other])


def test_a_model_of_another_shape_is_refused_before_any_read(tmp_path: Path) -> None:
    save_and_close(Run(tmp_path, 4).manager)
    stored = StoredCheckpoint(tmp_path / "checkpoint" / "step-1", Peers(timedelta(seconds=9)))
    with pytest.raises(
        CheckpointMismatch, match=r"model\.0\.weight: shape \[4, 3\] in the checkpoint, \[5, 3\] expected"
    ):
        stored._read(lambda: {"model.0.weight": torch.zeros(5, 3)})
