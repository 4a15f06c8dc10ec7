"""Runs on Parquet files with a tokenizer.json: killed and resumed, with another tokenizer, and without the extras."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.bpe import TEXTS, write_tokenizer
from tests.e2e.jobs import run, start
from tests.forked import REPO
from tests.processes import read_lines

STEPS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer.json and two Parquet files of several row groups: about 90 sequences of 64 tokens."""
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder)
    for number in range(2):
        table = pa.table({"text": TEXTS[60 * number : 60 * number + 60]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=13)
    return folder


def arguments(data: Path, *more: str) -> list[str]:
    return [
        f"--training.steps={STEPS}",
        "--training.seq_len=48",
        "--checkpoint.interval=3",
        "--lr_scheduler.warmup_steps=2",
        "--training.trace_samples",
        "--training.dataset=parquet",
        f"--training.dataset_path={data}/*.parquet",
        f"--model.tokenizer_path={data}",
        *more,
    ]


def samples(dump_folder: Path) -> dict[int, list[int]]:
    return {line["step"]: line["indices"] for line in read_lines(dump_folder / "samples" / "rank0.jsonl")}


def figures(dump_folder: Path, tag: str) -> dict[int, float]:
    return {line["step"]: line[tag] for line in read_lines(dump_folder / "metrics.jsonl")}


@pytest.mark.slow
def test_a_run_on_parquet_with_a_tokenizer_killed_and_resumed_has_the_samples_and_losses_of_the_straight_run(
    data: Path, tmp_path: Path
) -> None:
    straight = run(tmp_path / "straight", *arguments(data, "--training.batch_size=4"))
    with start(tmp_path / "killed", *arguments(data, "--training.batch_size=4")) as job:
        job.wait_until(lambda job: 10 in job.losses())
        job.kill()
        assert STEPS not in job.losses(), "the kill came too late for the test to show anything"
    resumed = run(tmp_path / "killed", *arguments(data, "--training.batch_size=4"))
    (event,) = resumed.events("resumed")
    assert 3 <= event["step"] <= 12
    assert resumed.losses() == straight.losses()
    assert samples(resumed.dump_folder) == samples(straight.dump_folder)
    for tag in ("data/epoch", "data/epoch_progress(%)"):
        assert figures(resumed.dump_folder, tag) == figures(straight.dump_folder, tag)
    assert resumed.log.count("Tokenising 2 files") == 0, "a restart reads the tokens that are there"
    epochs = figures(straight.dump_folder, "data/epoch")
    begin = min(step for step, epoch in epochs.items() if epoch == 1)
    assert f"Epoch 1 of the data begins in step {begin}\n" in straight.log
    assert f"epoch: {epochs[STEPS]:.0f} (" in straight.log


@pytest.mark.slow  # two jobs of two ranks
def test_two_ranks_resumed_as_one_continue_with_the_same_samples(data: Path, tmp_path: Path) -> None:
    given = arguments(data, "--training.global_batch_size=4", "--training.steps=12")
    run(tmp_path / "straight", *given)
    run(tmp_path / "two", *arguments(data, "--training.global_batch_size=4", "--training.steps=6"), ranks=2)
    resumed = run(tmp_path / "two", *given)
    first = [read_lines(tmp_path / "two" / "samples" / f"rank{rank}.jsonl")[:6] for rank in range(2)]
    taken = [line["indices"] for line in read_lines(tmp_path / "straight" / "samples" / "rank0.jsonl")]
    assert [a["indices"] + b["indices"] for a, b in zip(*first, strict=True)] == taken[:6]
    assert [resumed_step for step, resumed_step in samples(resumed.dump_folder).items() if step > 6] == taken[6:]


def change(data: Path, folder: Path, **tokenizer: Any) -> list[str]:
    """Return the arguments of a run on the same files with another tokenizer at the same path as before."""
    write_tokenizer(folder, **tokenizer)
    return arguments(data, f"--model.tokenizer_path={folder}", "--training.steps=6")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"special": ("<s>", "</s>"), "texts": [*TEXTS[::-1], "other words entirely " * 50]}, id="merges"),
        pytest.param({"vocab_size": 420}, id="vocabulary", marks=pytest.mark.slow),
    ],
)
def test_a_changed_tokenizer_is_refused_by_name(data: Path, tmp_path: Path, changed: dict[str, Any]) -> None:
    run(tmp_path / "run", *change(data, tmp_path / "tokenizer"), "--training.steps=3")
    given = change(data, tmp_path / "tokenizer", **changed)
    with start(tmp_path / "run", *given) as job:
        assert job.wait() == [1], job.log
    assert "the corpus is not the one that this run was trained on: tokenizer: " in job.log
    assert [path.name for path in sorted((tmp_path / "run" / "checkpoint").glob("step-*"))] == ["step-3"]


@pytest.mark.slow
def test_a_tokenizer_in_place_of_bytes_is_refused_before_the_model_is_built(data: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", *arguments(data, "--model.tokenizer_path=bytes", "--training.steps=3"))
    with start(tmp_path / "run", *arguments(data)) as job:
        assert job.wait() == [1], job.log
    assert f"model.tokenizer_path: bytes -> {data}  refused" in job.log


@pytest.mark.parametrize(
    ("hidden", "given", "install"),
    [
        ("tokenizers", ["--model.tokenizer_path={data}"], "tokenizers is not installed. Install it with: pip install "
         "'torchtitan-lite[tokenizers]'"),
        ("pyarrow", ["--training.dataset=parquet", "--training.dataset_path={data}/*.parquet"],
         "pyarrow is not installed. Install it with: pip install 'torchtitan-lite[parquet]'"),
        ("datasets", ["--training.dataset=huggingface", "--training.dataset_path={data}"],
         "datasets is not installed. Install it with: pip install 'torchtitan-lite[datasets]'"),
    ],
)  # fmt: skip
@pytest.mark.slow  # three starts of Python with torch
def test_without_its_extra_a_run_ends_with_one_line_that_says_how_to_install_it(
    data: Path, tmp_path: Path, hidden: str, given: list[str], install: str
) -> None:
    """The process refuses to import the package, as one does that lacks it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {hidden!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    command = [sys.executable, str(REPO / "train.py"), "--job.config_file=llama_debug.toml"]
    command += [f"--job.dump_folder={tmp_path}/run", *(word.format(data=data) for word in given)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPO}"}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"ERROR - ExtraMissing: {install}\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_that_only_loads_writes_no_tokens(data: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", *arguments(data, "--training.steps=3"))
    for path in sorted((tmp_path / "run" / "tokens").glob("*/*")):
        path.unlink()
    before = sorted((tmp_path / "run").rglob("*"))
    job = run(tmp_path / "run", *arguments(data, "--training.steps=6", "--checkpoint.load_only"))
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert "step:  6  loss" in job.log
    assert "This run writes nothing into" in job.log


@pytest.mark.slow
def test_the_state_in_the_checkpoint_names_the_tokenizer(data: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", *arguments(data, "--training.steps=3"))
    manifest = json.loads((tmp_path / "run" / "checkpoint" / "step-3" / "manifest.json").read_text())
    assert any("dataloader.tokenizer" in str(key) for key in manifest["objects"]), list(manifest)


@pytest.mark.slow  # two starts of a job
def test_another_tokenizer_of_the_same_size_is_never_put_next_to_the_weights_of_a_finished_run(
    data: Path, tmp_path: Path
) -> None:
    two = ("--training.steps=2", "--training.batch_size=2")
    run(tmp_path / "run", *arguments(data, *two))
    document = json.loads((data / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    one, other = [*vocabulary][390:392]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "other.json").write_text(json.dumps(document))
    changed = (*two, "--checkpoint.last_save_in_hf", f"--model.tokenizer_path={tmp_path}/other.json")
    with start(tmp_path / "run", *arguments(data, *changed)) as job:
        assert job.wait() == [2], job.log
    assert "ConfigError: model.tokenizer_path: expected the tokenizer of" in job.log and "Traceback" not in job.log
    assert not list((tmp_path / "run" / "hf").iterdir())
    run(tmp_path / "run", *arguments(data, *two, "--checkpoint.last_save_in_hf"))
    written = tmp_path / "run" / "hf" / "step-2" / "tokenizer.json"
    assert written.read_bytes() == (data / "tokenizer.json").read_bytes()
