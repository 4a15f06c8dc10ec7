"""`checkpoint.last_save_in_hf`: what a run leaves for Hugging Face's libraries, and what a killed one leaves to do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.one_file import as_one_file
from tests.e2e.jobs import REPO, Job, run, start
from tests.forked import run_code
from tests.processes import read_lines
from tests.store.filled import flip

STEPS = "--training.steps=2"
IN_HF = ("--checkpoint.last_save_in_hf", "--checkpoint.export_dtype=bfloat16")
FILES = [
    *("README.md", "config.json", "export.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
]
POINTS = {
    "committed": "",  # of the full checkpoint
    "open": "path=hf/*/model.safetensors",
    "write": "path=hf/*/model.safetensors",
    "fsync": "path=hf/*/model.safetensors",
    "hugging_face": "",
}

LOADED = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from torchtitan_lite.checkpoint import load_model
from torchtitan_lite.data.tokenizer import ByteTokenizer
from torchtitan_lite.config.job_config import Model
from torchtitan_lite.models.llama.config_file import build_model_args
from torchtitan_lite.models.llama.model import Transformer
folder = {folder!r}
theirs = AutoModelForCausalLM.from_pretrained(folder + "/hf/step-2")
assert theirs.dtype == torch.float32
ours = Transformer(build_model_args(Model(flavor="debugmodel"), vocab_size=ByteTokenizer.vocab_size, seq_len=64))
ours.init_weights(0)
load_model(ours, folder + "/checkpoint")
tokens = AutoTokenizer.from_pretrained(folder + "/hf/step-2")("def main():", return_tensors="pt")["input_ids"]
assert tokens[0].tolist() == [256, *b"def main():"], tokens
with torch.no_grad():
    difference = (theirs(tokens).logits - ours(tokens)).abs().max().item()
assert difference < 1e-5, difference
print("equal logits")
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dump folder of a run of two steps without an export."""
    return run(tmp_path_factory.mktemp("finished") / "run", STEPS).dump_folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.mark.slow
def test_the_last_save_is_written_once_and_a_rerun_ends_at_once(tmp_path: Path) -> None:
    job = run(tmp_path / "run", STEPS, *IN_HF)
    _is_the_export_of(job.dump_folder)
    assert "Saving the weights in Hugging Face's format in bfloat16 at last step, step 2." in job.log
    (event,) = job.events("exported")
    assert event["step"] == 2 and event["path"] == str(job.dump_folder / "hf" / "step-2") and event["bytes"] > 0
    again = run(tmp_path / "run", STEPS, *IN_HF)
    assert f"step 2 of 2 is in {tmp_path}/run/checkpoint and {tmp_path}/run/hf. To continue" in again.log
    assert len(again.events("exported")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_after_a_kill_before_the_export_is_complete_a_rerun_writes_it_without_training(
    point: str, tmp_path: Path
) -> None:
    conditions = ",".join(filter(None, ("step=2" if not POINTS[point] else "", POINTS[point])))
    fault = {"TORCHTITAN_LITE_FAULT": f"kill@{point}:{conditions}"}
    with start(tmp_path / "run", STEPS, *IN_HF, environment=fault) as job:
        assert job.wait() == [-9], job.log
    assert "step-2" in job.checkpoints
    assert not (tmp_path / "run" / "hf" / "step-2").exists()
    _writes_it_and_trains_nothing(tmp_path / "run")


@pytest.mark.slow  # two jobs of two ranks
def test_after_a_kill_of_two_ranks_a_rerun_on_one_writes_it(tmp_path: Path) -> None:
    fault = {"TORCHTITAN_LITE_FAULT": "kill@hugging_face"}
    with start(tmp_path / "run", STEPS, *IN_HF, ranks=2, environment=fault) as job:
        assert job.processes[0].wait(60) == -9
        job.kill()
    _writes_it_and_trains_nothing(tmp_path / "run")


@pytest.mark.slow  # a wait of six seconds
def test_the_other_ranks_wait_longer_than_for_a_collective_of_training(tmp_path: Path) -> None:
    fault = {"TORCHTITAN_LITE_FAULT": "slow@hugging_face:seconds=6"}
    short = ("--comm.train_timeout_seconds=2", "--comm.init_timeout_seconds=60")
    job = run(tmp_path / "run", STEPS, *IN_HF, *short, ranks=2, environment=fault)
    assert "Training completed" in job.log


@pytest.mark.slow  # a job of four ranks
@pytest.mark.parametrize("degrees", [("tensor_parallel", 4), ("pipeline_parallel", 2)], ids=["tp2 fsdp2", "pp2"])
def test_every_topology_writes_the_weights_of_its_checkpoint(degrees: tuple[str, int], tmp_path: Path) -> None:
    name, ranks = degrees
    folder = run(tmp_path / "run", STEPS, *IN_HF, f"--parallelism.{name}_degree=2", ranks=ranks).dump_folder
    _is_the_export_of(folder)


@pytest.mark.slow  # five starts of a job
def test_a_finished_run_gets_its_export_later_and_another_one_where_it_does_not_count(copied: Path) -> None:
    _writes_it_and_trains_nothing(copied)
    run(copied, STEPS, "--checkpoint.last_save_in_hf")
    assert load_file(copied / "hf" / "step-2" / "model.safetensors")["lm_head.weight"].dtype == torch.float32
    cut = copied / "hf" / "step-2" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    run(copied, STEPS, "--checkpoint.last_save_in_hf")
    assert load_file(cut)["lm_head.weight"].dtype == torch.float32
    other = shutil.copytree(copied, copied.with_name("other"))
    shutil.rmtree(other / "checkpoint")
    run(other, STEPS, *IN_HF, "--training.seed=7")
    _is_the_export_of(other)


@pytest.mark.slow  # three starts of a job
def test_a_weights_only_run_writes_it_from_the_weights(tmp_path: Path) -> None:
    arguments = ("--training.steps=3", "--checkpoint.interval=2", "--checkpoint.model_weights_only", *IN_HF)
    fault = {"TORCHTITAN_LITE_FAULT": "kill@hugging_face"}
    with start(tmp_path / "run", *arguments, environment=fault) as job:
        assert job.wait() == [-9], job.log
    dry = run(tmp_path / "run", *arguments, "--checkpoint.dry_run")
    assert "Nothing is left to train, but the weights would be written in Hugging Face's format" in dry.log
    again = run(tmp_path / "run", *arguments)
    assert "Training starts" not in again.log and "Loading the checkpoint" not in again.log
    assert sorted(path.name for path in (tmp_path / "run" / "hf").iterdir()) == ["step-3"]


@pytest.mark.slow  # three starts of a job
def test_a_full_disk_is_one_sentence_and_the_checkpoint_stays(tmp_path: Path) -> None:
    fault = {"TORCHTITAN_LITE_FAULT": "ENOSPC@open:path=hf/*/model.safetensors"}
    with start(tmp_path / "run", STEPS, *IN_HF, environment=fault) as job:
        assert job.wait() == [1], job.log
    assert "Traceback" not in job.log
    assert "run/hf/step-2, in Hugging Face's format, was not written: [Errno 28]" in job.log
    assert "The checkpoint itself is durable: start the same command again" in job.log
    assert not list((tmp_path / "run" / "hf").iterdir()), "nothing half is left"
    _writes_it_and_trains_nothing(tmp_path / "run")


@pytest.mark.slow  # a start of a job
def test_a_damaged_checkpoint_is_named_and_a_folder_of_others_is_left_alone(copied: Path) -> None:
    (copied / "hf" / "step-2").mkdir(parents=True)
    (copied / "hf" / "step-2" / "notes.txt").write_text("mine")
    with start(copied, STEPS, *IN_HF) as job:
        assert job.wait() == [2]
    assert "hf/step-2 exists, and no run wrote it. Move it away" in job.log
    shutil.rmtree(copied / "hf")
    (file,) = (copied / "checkpoint" / "step-2").glob("*.distcp")
    flip(file, file.stat().st_size // 20)
    with start(copied, STEPS, *IN_HF) as job:
        assert job.wait() == [1]
    assert "step-2 is damaged" in job.log and "Traceback" not in job.log
    assert not list((copied / "hf").iterdir())


@pytest.mark.slow  # imports transformers
def test_transformers_loads_it_offline_with_our_logits_and_its_tokenizer(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", STEPS, "--checkpoint.last_save_in_hf").dump_folder
    log = tmp_path / "log"
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPO), "PATH": str(Path(sys.executable).parent)}
    assert run_code(LOADED.format(folder=str(folder)), log, environment).wait(120) == 0, log.read_text()
    assert "equal logits" in log.read_text()


def _writes_it_and_trains_nothing(folder: Path) -> Job:
    before = len(read_lines(folder / "metrics.jsonl"))
    job = run(folder, STEPS, *IN_HF)
    assert "Training starts" not in job.log and "Loading the checkpoint" not in job.log
    assert len(read_lines(folder / "metrics.jsonl")) == before
    assert "Training completed: step 2 of 2 is in" in job.log
    _is_the_export_of(folder)
    return job


def _is_the_export_of(folder: Path) -> None:
    """Check that the folder in Hugging Face's format has the weights of step 2, cast, and is the only one."""
    assert [path.name for path in (folder / "hf").iterdir()] == ["step-2"]
    assert sorted(path.name for path in (folder / "hf" / "step-2").iterdir()) == FILES
    exported = load_file(folder / "hf" / "step-2" / "model.safetensors")
    stored = as_one_file(folder / "checkpoint" / "step-2")["model"]
    assert len(exported) == 39
    assert torch.equal(exported["model.norm.weight"], stored["norm.weight"].bfloat16())
    assert torch.equal(exported["model.embed_tokens.weight"], stored["tok_embeddings.weight"].bfloat16())


@pytest.mark.slow  # two starts of a job
@pytest.mark.parametrize("point", ["write", "hugging_face"])
def test_what_a_killed_export_left_is_removed_by_that_of_a_later_step(point: str, tmp_path: Path) -> None:
    with start(
        tmp_path / "run", STEPS, *IN_HF, environment={"TORCHTITAN_LITE_FAULT": f"kill@{point}:{POINTS[point]}"}
    ) as job:
        assert job.wait() == [-9], job.log
    assert len(list((tmp_path / "run" / "hf").iterdir())) == 1
    run(tmp_path / "run", "--training.steps=3", *IN_HF)
    assert [path.name for path in (tmp_path / "run" / "hf").iterdir()] == ["step-3"]


@pytest.mark.slow
def test_a_folder_of_others_in_its_place_is_refused_before_a_step_is_trained(tmp_path: Path) -> None:
    (tmp_path / "run" / "hf" / "step-2").mkdir(parents=True)
    with start(tmp_path / "run", STEPS, *IN_HF) as job:
        assert job.wait() == [2]
    assert "hf/step-2 exists, and no run wrote it. Move it away" in job.log
    assert not list((tmp_path / "run" / "checkpoint").glob("step-*"))
