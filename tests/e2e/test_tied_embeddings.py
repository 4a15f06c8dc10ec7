"""Tied embeddings of published weights: one tensor through import, training, a resume and the export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch

from tests.checkpoint.importing.sources import ARGS, in_their_names, weights, write_config
from tests.e2e.jobs import run, start
from tests.hugging_face import assert_same_function, our_model
from torchtitan_lite.data.tokenizer import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TIED = dataclasses.replace(ARGS, vocab_size=ByteTokenizer.vocab_size, max_seq_len=64, tie_word_embeddings=True)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Weights as transformers saves a model whose embeddings are tied."""
    state = {name: tensor / 50 for name, tensor in weights(TIED).items()}
    folder = write_config(tmp_path / "published", TIED)
    safetensors.torch.save_file(in_their_names(state, TIED), folder / "model.safetensors", {"format": "pt"})
    return folder


def stored(step: Path) -> set[str]:
    manifest = json.loads((step / "manifest.json").read_text())
    return {key for key in manifest["tensors"] if key.startswith("model.")}


@pytest.mark.parametrize(
    ("ranks", "degrees"),
    [
        pytest.param(1, (), marks=pytest.mark.slow),
        pytest.param(2, (), marks=pytest.mark.exhaustive),
        pytest.param(2, ("--parallelism.tensor_parallel_degree=2",), marks=pytest.mark.slow),
    ],
    ids=["one process", "FSDP 2", "TP 2"],
)
def test_a_resumed_run_of_tied_embeddings_is_the_straight_one_and_transformers_ties_its_export(
    published: Path, tmp_path: Path, ranks: int, degrees: tuple[str, ...]
) -> None:
    given = (
        f"--model.config_path={published}",
        "--checkpoint.initial_load_in_hf",
        f"--checkpoint.initial_load_path={published}",
        "--checkpoint.last_save_in_hf",
        "--checkpoint.interval=2",
        "--lr_scheduler.warmup_steps=0",
        "--training.seed=3",
        *degrees,
    )
    straight = run(tmp_path / "straight", "--training.steps=4", *given, ranks=ranks)
    fault = {"TORCHTITAN_LITE_FAULT": "kill@step:step=3"}
    with start(tmp_path / "resumed", "--training.steps=4", *given, ranks=ranks, environment=fault) as job:
        assert set(job.wait()) == {-9}, job.log
    resumed = run(tmp_path / "resumed", "--training.steps=4", *given, ranks=ranks)
    assert "Training starts at step 3," in resumed.log
    assert resumed.losses() == straight.losses()
    last = tmp_path / "resumed" / "checkpoint" / "step-4"
    names = stored(last)
    assert "model.tok_embeddings.weight" in names and "model.output.weight" not in names
    out = tmp_path / "resumed" / "hf" / "step-4"
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is True
    assert_same_function(our_model(last, TIED), out)


@pytest.mark.slow  # a start of two ranks
def test_a_pipeline_of_tied_embeddings_is_refused_by_name(published: Path, tmp_path: Path) -> None:
    given = (f"--model.config_path={published}", "--parallelism.pipeline_parallel_degree=2", "--training.steps=2")
    with start(tmp_path / "run", *given, ranks=2) as job:
        assert set(job.wait()) == {2}, job.log
    assert "parallelism.pipeline_parallel_degree: the embeddings of this model are tied" in job.log
    assert "Traceback" not in job.log
