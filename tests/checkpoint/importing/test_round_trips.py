"""What is exported to Hugging Face's form and imported back is the same model, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from tests.checkpoint.importing.sources import ARGS, weights
from tests.cli.command import command
from tests.e2e.jobs import start
from tests.hugging_face import write_model
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.config.job_config import Model
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.models.llama.args import ModelArgs
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.hugging_face import describe
from torchtitan_lite.models.llama.imported import unseen
from torchtitan_lite.models.llama.model import Transformer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def model_of(step: Path, args: ModelArgs) -> dict[str, torch.Tensor]:
    """Return the model of the checkpoint `step`, as stock DCP reads it."""
    with torch.device("meta"):
        names = Transformer(args).state_dict()
    state = {f"model.{name}": torch.empty(tensor.shape) for name, tensor in names.items()}
    dcp_load(state, checkpoint_id=step, no_dist=True)
    return state


def assert_comes_back(step: Path, args: ModelArgs, folder: Path, most_bytes: int | None) -> None:
    """Fail unless the model of `step` is the same after an export to and an import from Hugging Face's form."""
    write_model(
        open_checkpoint(step), describe(args, {}, None, None), folder / "hf", unseen, dtype="float32",
        max_shard_bytes=most_bytes, of_trainer=True,
    )  # fmt: skip
    ended = command("import-weights", folder / "hf", folder / "step-0", "--files", "3")
    assert (ended.code, ended.err) == (0, "")
    before, after = model_of(step, args), model_of(folder / "step-0", args)
    assert [key for key in before if not torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("most_bytes", [None, 40_000])
def test_a_saved_llama_comes_back(most_bytes: int | None, tmp_path: Path) -> None:
    model = Transformer(ARGS)
    model.load_state_dict(weights())
    with CheckpointManager.for_loop(
        model=model, optimizer=torch.optim.SGD(model.parameters()), folder=tmp_path / "run", preemption_signals=()
    ) as manager:
        manager.load()
        manager.save(1, force=True)
    assert_comes_back(tmp_path / "run" / "step-1", ARGS, tmp_path, most_bytes)


@pytest.mark.slow  # Jobs of up to four processes: 15 s each.
@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        pytest.param(2, ["--parallelism.tensor_parallel_degree=2"], marks=pytest.mark.exhaustive),
        (4, ["--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=2"]),
        (2, ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_microbatches=2"]),
    ],
    ids=["tp2", "tp2 x fsdp2", "pp2"],
)
def test_a_trained_llama_of_several_ranks_comes_back_and_continues(
    ranks: int, degrees: list[str], tmp_path: Path
) -> None:
    with start(tmp_path / "run", "--training.steps=4", *degrees, ranks=ranks) as job:
        assert job.wait() == [0] * ranks, job.log
    config = open_checkpoint(tmp_path / "run" / "checkpoint" / "step-4").saved_by.config["model"]

    args = build_model_args(Model(**config), vocab_size=258, seq_len=64)
    assert_comes_back(tmp_path / "run" / "checkpoint" / "step-4", args, tmp_path, 200_000)
    initial = f"--checkpoint.initial_load_path={tmp_path / 'step-0'}"
    sizes = f"--model.config_path={tmp_path / 'hf'}"
    with start(tmp_path / "next", "--training.steps=2", initial, sizes, *degrees, ranks=ranks) as job:
        assert job.wait() == [0] * ranks, job.log
    assert "Starting from" in job.log
