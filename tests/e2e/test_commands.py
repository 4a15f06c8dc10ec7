"""What one command gives its user: the files of a run, its export, and one message for each mistake."""

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoint.one_file import as_one_file
from tests.e2e.jobs import run, start
from torchtitan_lite.config.job_config import Model
from torchtitan_lite.data.tokenizer import ByteTokenizer
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.model import Transformer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of a run of 6 steps on two ranks under torchrun, with a bfloat16 export at the end."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    arguments = ("--training.steps=6", "--checkpoint.interval=3", "--metrics.enable_tensorboard")
    export = ("--checkpoint.model_weights_only", "--checkpoint.export_dtype=bfloat16")
    job = run(folder, *arguments, *export, ranks=2, torchrun=[])
    for line in (
        "Starting job: ",
        f"Checkpointing active. Checkpoints will be loaded from and saved to {folder}/checkpoint",
        "Training starts at step 1, ",
        "step:  1  loss: ",
        "Saving a model weights only checkpoint in torch.bfloat16 at last step, step 6.",
        "Training completed",
    ):
        assert job.log.count(line) == 1, f"expected {line!r} once in\n{job.log}"
    return folder


@pytest.mark.slow
def test_a_run_writes_checkpoints_tensorboard_metrics_events_and_its_config(exported: Path) -> None:
    assert sorted(path.name for path in (exported / "checkpoint").iterdir()) == ["step-3", "step-6"]
    assert sorted(path.name for path in (exported / "checkpoint" / "step-3").iterdir()) == [
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
        "manifest.json",
    ]
    assert list((exported / "tb").glob("events.out.tfevents.*"))
    assert [json.loads(line)["step"] for line in (exported / "metrics.jsonl").read_text().splitlines()] == [
        *range(1, 7)
    ]
    events = [json.loads(line)["event"] for line in (exported / "events.jsonl").read_text().splitlines()]
    assert events == [*(["save_started", "staged", "committed"] * 2), "finished"]
    assert json.loads((exported / "config.json").read_text())["training"]["steps"] == 6


@pytest.mark.slow
def test_dcp_to_torch_reads_a_full_and_a_weights_only_checkpoint(exported: Path) -> None:
    full = as_one_file(exported / "checkpoint" / "step-3")
    assert {"model", "optimizer", "lr_scheduler", "dataloader", "train_state", "rng"} == set(full)
    weights = as_one_file(exported / "checkpoint" / "step-6")
    model = Transformer(build_model_args(Model(), vocab_size=ByteTokenizer.vocab_size, seq_len=64))
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    model.load_state_dict(weights, strict=True)


@pytest.mark.slow
def test_a_new_interpreter_runs_the_script_and_logs_that_the_run_is_finished(exported: Path) -> None:
    again = run(exported, "--training.steps=6", cold=True)
    assert "Training completed: step 6 of 6 is in" in again.log


@pytest.mark.slow
def test_a_finished_run_with_more_steps_continues_from_its_last_full_checkpoint(exported: Path) -> None:
    again = run(exported, "--training.steps=6")
    assert "Training completed: step 6 of 6 is in" in again.log
    longer = run(exported, "--training.steps=8", "--checkpoint.interval=3")
    assert "Training starts at step 4," in longer.log
    assert longer.checkpoints == ["step-3", "step-6", "step-6.weights", "step-8"]
    manifest = json.loads((exported / "checkpoint" / "step-6" / "manifest.json").read_text())
    assert manifest["kind"] == "full", (
        "training through step 6 again saved a full checkpoint under the name of the weights-only one"
    )


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--checkpoint.intervall", "5"], 2, ["checkpoint.intervall", "checkpoint.interval"]),
        (["--job.config_file", "nowhere.toml"], 2, ["nowhere.toml", "llama_debug.toml"]),
        (["--toml", '[checkpoint]\ninterval = "five"'], 2, ["checkpoint.interval", "five"]),
        (["--toml", '[checkpoint]\ninterval = "5"'], 2, ["checkpoint.interval", "5"]),
        (["--toml", "[chekpoint]\ninterval = 5"], 2, ["chekpoint", "checkpoint"]),
        (["--checkpoint.load_step", "7"], 1, ["step 7", "--checkpoint.load_step"]),
        (["--checkpoint.initial_load_path", "nowhere"], 1, ["nowhere", "no such file or folder"]),
        (["--training.global_batch_size", "3"], 2, ["training.global_batch_size", "2 and 4 would do"]),
    ],
)
def test_a_mistake_is_one_message_that_names_the_thing_and_the_fix(
    arguments: list[str], code: int, said: list[str], tmp_path: Path
) -> None:
    if arguments[0] == "--toml":
        (tmp_path / "job.toml").write_text(arguments[1] + "\n")
        arguments = ["--job.config_file", str(tmp_path / "job.toml")]
    with start(tmp_path / "run", *arguments) as job:
        assert job.wait() == [code], job.log
    (message,) = [line for line in job.log.splitlines() if "Error: " in line or "NotFound: " in line]
    assert all(part in message for part in said), message
    assert "Traceback" not in job.log


@pytest.mark.slow
def test_one_process_makes_a_seed_checkpoint_and_any_number_of_processes_start_from_it(tmp_path: Path) -> None:
    seed = run(tmp_path / "run", "--checkpoint.create_seed_checkpoint")
    assert seed.log.count("Created seed checkpoint") == 1 and seed.checkpoints == ["step-0"] and not seed.losses()
    begun = run(tmp_path / "run", "--training.steps=1", ranks=2)
    assert "Loading the checkpoint at step 0." in begun.log and "Training starts at step 1," in begun.log
    with start(tmp_path / "two", "--checkpoint.create_seed_checkpoint", ranks=2) as job:
        assert job.wait() == [2, 2]
        assert "create_seed_checkpoint: expected one process, found 2." in job.log


@pytest.mark.exhaustive
def test_the_debug_model_learns_from_real_text(tmp_path: Path) -> None:
    sizes = ("--training.batch_size=8", "--training.seq_len=256")
    job = run(tmp_path / "run", *sizes, "--training.steps=100", "--checkpoint.interval=50")
    assert min(job.losses().values()) < 2.9 and job.losses()[100] < 2.9
    assert job.checkpoints == ["step-100", "step-50"]
