"""A dry run says what a start would do, on any machine: it uses no memory for the model and needs no other rank."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.e2e.jobs import DEADLINE_SECONDS, TINY, run, start
from tests.forked import REPO, run_code

CONFIGS = [  # Variants of llama_debug.toml need no other model; another test has a dry run of 405B.
    pytest.param(path.name, marks=[pytest.mark.slow] if path.stem.startswith(("llama_debug_", "llama3_405b")) else [])
    for path in sorted((REPO / "train_configs").glob("*.toml"))
]
RANKS = {"llama3_8b.toml": 8, "llama3_70b.toml": 64, "llama3_405b.toml": 512}
"""The number of GPUs that a config is for; the others are for one process."""

MEASURED = """
import resource, sys
from torchtitan_lite.train import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
code = main({arguments!r})
print("MiB used:", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
sys.exit(code)
"""


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """The arguments for a corpus that is large enough for a step of any config."""
    path = tmp_path / "corpus.txt"
    path.write_text("a line of the corpus\n" * 2_000)
    return f"--training.dataset_path={path}"


def dry_run(folder: Path, *arguments: str, config: str = "llama_debug.toml") -> tuple[int, str]:
    """Return the exit code and the log of a dry run in `folder`."""
    given = [f"--job.config_file={config}", f"--job.dump_folder={folder}", "--checkpoint.dry_run", *arguments]
    log = folder.with_suffix(".dry.log")
    log.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = run_code(MEASURED.format(arguments=given), log, environment).wait(DEADLINE_SECONDS)
    return code, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_a_dry_run_accepts_every_config_on_a_small_machine(config: str, corpus: str, tmp_path: Path) -> None:
    ranks = [f"--comm.simulated_ranks={RANKS[config]}"] if config in RANKS else []
    data = [corpus] if config in RANKS else []
    code, log = dry_run(tmp_path / "run", *ranks, *data, config=config)
    assert code == 0, log
    assert f"The plan fits {RANKS.get(config, 1)} rank" in log
    assert "it would be a fresh start" in log
    used = re.search(r"MiB used: (\d+)", log)
    assert used and int(used[1]) < 512, log
    assert not (tmp_path / "run").exists(), "it writes nothing"


@pytest.mark.slow
def test_a_dry_run_of_405b_lists_what_each_rank_holds(corpus: str, tmp_path: Path) -> None:
    pipeline = ("--parallelism.pipeline_parallel_degree=4", "--training.batch_size=4", "--comm.simulated_ranks=1024")
    _, log = dry_run(tmp_path / "run", *pipeline, corpus, config="llama3_405b.toml")
    assert "The plan fits 1,024 ranks (pp 4 x dp_shard 32 x tp 8):" in log
    assert "step: 128 sequences of 8,192 tokens: 32 shares of 4, in 4 micro-batches" in log
    assert re.search(r"largest rank: 398,\d{3},\d{3} parameters, 5\.9 GiB\n", log)
    assert [int(rank) for rank in re.findall(r"pp rank (\d): layers \d+-\d+: [\d,]+ parameters", log)] == [*range(4)]


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--comm.simulated_ranks=12"], r"tp 8 = 8, which does not divide this job's 12 processes"),
        (["--comm.simulated_ranks=8", "--parallelism.tensor_parallel_degree=3"], r"tp 3 = 3, which does not divide"),
        (["--comm.simulated_ranks=16", "--parallelism.tensor_parallel_degree=16"], r"divisor of .* n_kv_heads 8, fou"),
        (["--comm.simulated_ranks=16", "--training.global_batch_size=3"], r"3 is not a multiple of batch_size x ranks"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(arguments: list[str], refusal: str, tmp_path: Path) -> None:
    code, log = dry_run(tmp_path / "run", *arguments, config="llama3_405b.toml")
    assert code == 2
    assert re.search(refusal, log), log


@pytest.mark.slow
def test_the_plan_shows_how_a_step_is_put_together(tmp_path: Path) -> None:
    _, one = dry_run(tmp_path / "one", *TINY)
    assert "The plan fits 1 rank:\n  step: 2 sequences of 64 tokens: 1 share of 2\n" in one
    _, many = dry_run(tmp_path / "many", *TINY, "--comm.simulated_ranks=4", "--training.global_batch_size=24")
    assert "The plan fits 4 ranks (dp_shard 4):\n  step: 24 sequences of 64 tokens: 4 shares of 2, acc" in many
    assert "accumulated 3 times\n  tokens in a step: 1,536\n" in many


def test_the_plan_comes_before_a_refusal_of_data_that_are_elsewhere(tmp_path: Path) -> None:
    missing = f"--training.dataset_path={tmp_path}/nowhere/*.txt"
    code, log = dry_run(tmp_path / "run", "--comm.simulated_ranks=8", missing, config="llama3_8b.toml")
    assert code == 2
    assert log.index("The plan fits 8 ranks (dp_shard 8)") < log.index("no file matches")


@pytest.mark.slow  # Trains first, then builds the model of eight ranks twice.
def test_a_dry_run_as_one_of_many_ranks_reports_a_resume_and_changes_nothing(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "--training.steps=2").dump_folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    split = ("--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2")
    code, log = dry_run(folder, *TINY, *split, "--comm.simulated_ranks=8", "--training.steps=4")
    assert code == 0, log
    assert f"Resume from {folder}/checkpoint/step-2, step 2:" in log
    assert "  keys: all there, all fit" in log
    assert "  topology: 1 process -> pp 2 x dp_shard 2 x tp 2" in log
    assert "It would continue." in log
    assert "simulated_ranks" not in log.partition("Resume from")[2]
    code, log = dry_run(folder, *TINY, "--comm.simulated_ranks=4", "--checkpoint.load_rename=^output[.]=other.")
    assert code == 1
    assert "output.weight" in log.partition("It would be refused:")[2]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_simulated_ranks_are_refused_outside_a_dry_run(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--comm.simulated_ranks=4") as job:
        assert job.wait() == [2]
    assert "can be simulated only by a dry run" in job.log


def test_simulated_ranks_are_refused_in_a_job_of_several_processes(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--comm.simulated_ranks=4", "--checkpoint.dry_run", ranks=2) as job:
        assert job.wait() == [2, 2]
    assert "comm.simulated_ranks: expected one process, found 2. Run python train.py without torchrun" in job.log
