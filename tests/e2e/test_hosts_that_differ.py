"""Two hosts that do not fit together end at the start, with a sentence for each misfit; nothing was trained."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.data.bpe import TEXTS, write_tokenizer
from tests.e2e.jobs import DEADLINE_SECONDS, TINY
from tests.forked import REPO
from tests.hosts import Hosts, network
from tests.keepers import OFF
from torchtitan_lite import __version__

pytestmark = pytest.mark.slow

AHEAD = """import time
clock = time.time
time.time = lambda: clock() + 5000
"""
"""Of a sitecustomize, which every Python process imports first: a host has no clock of its own here."""

OTHER_TORCH = """
import torch
torch.__version__ = type(torch.__version__)("2.99.0")
"""
"""In a copy of the package."""


@dataclass
class Rank:
    """What is different where one of the two ranks runs."""

    options: Sequence[str] = ()
    mounts: Mapping[Path, Path] = field(default_factory=dict)
    path: str = ""
    """PYTHONPATH, which a new interpreter reads."""
    script: Path = REPO / "train.py"
    """Of its own folder's package, for which it is a new interpreter, too."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with network() as found:
        found.add()
        found.add()
        yield found


def train(hosts: Hosts, folder: Path, second: Rank, *options: str) -> tuple[list[int], list[str]]:
    """Train for two steps on the hosts, of which `second` has the second rank. Return exit codes and logs by rank."""
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(2)]
    for rank, (host, own) in enumerate(zip(hosts.hosts, (Rank(), second), strict=True)):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29400"}
        environment = {**OFF, **place, "MASTER_ADDR": hosts.hosts[0].address, "PYTHONPATH": own.path}
        given = [*TINY, f"--job.dump_folder={folder}/run", "--training.steps=2", *options, *own.options]
        start = host.start if own.path or own.script != Rank.script else host.fork
        processes.append(start([sys.executable, str(own.script), *given], logs[rank], environment, own.mounts))
    codes = [process.wait(DEADLINE_SECONDS) for process in processes]
    return codes, [log.read_text() for log in logs]


def refusal(codes: Sequence[int], logs: Sequence[str]) -> list[str]:
    """Return the lines of the only error in the `logs`, which rank 0 reports, of ranks that trained nothing."""
    assert list(codes) == [1, 1], "\n".join(logs)
    assert "Training starts" not in logs[0]
    assert "differ" not in logs[1] and "Error" not in logs[1], logs[1]
    lines = logs[0].splitlines()
    first = next(number for number, line in enumerate(lines) if " - ERROR - " in line)
    return [
        lines[first].partition(" - ERROR - ")[2],
        *(line.strip() for line in lines[first + 1 :] if line[:2] == "  "),
    ]


def test_other_versions_and_another_config_file(hosts: Hosts, tmp_path: Path) -> None:
    shutil.copytree(REPO / "torchtitan_lite", tmp_path / "other" / "torchtitan_lite")
    init = tmp_path / "other" / "torchtitan_lite" / "__init__.py"
    init.write_text(re.sub('__version__ = ".*"', '__version__ = "9.9"', init.read_text()) + OTHER_TORCH)
    script = Path(shutil.copy(REPO / "train.py", tmp_path / "other"))
    config = tmp_path / "other.toml"
    debug = (REPO / "torchtitan_lite" / "train_configs" / "llama_debug.toml").read_text()
    config.write_text(
        debug.replace("warmup_steps = 20 ", "warmup_steps = 21 ").replace("interval = 50", "interval = 5")
    )
    assert refusal(
        *train(
            hosts, tmp_path, Rank([f"--job.config_file={config}", "--checkpoint.no_enable_checkpoint"], script=script)
        )
    ) == [
        "HostsDiffer: the hosts of this job do not fit together:",
        f"torchtitan_lite: expected {__version__}, as rank 0 on host-2 has it, found 9.9 on rank 1 on host-3. "
        "Install one version on all hosts.",
        f"torch: expected {'.'.join(torch.__version__.split('.')[:2])}, as rank 0 on host-2 has it, found 2.99 "
        "on rank 1 on host-3. Install one version on all hosts.",
        "lr_scheduler.warmup_steps: expected 20, as rank 0 on host-2 has it, found 21 on rank 1 on host-3. "
        "Start all ranks with the same file and the same options.",
        "checkpoint.enable_checkpoint: expected True, as rank 0 on host-2 has it, found False on rank 1 on host-3. "
        "Start all ranks with the same file and the same options.",
        "checkpoint.interval: expected 50, as rank 0 on host-2 has it, found 5 on rank 1 on host-3. "
        "Start all ranks with the same file and the same options.",
    ]
    assert not (tmp_path / "run").exists(), "nothing was written"


def test_other_data_and_another_tokenizer(hosts: Hosts, tmp_path: Path) -> None:
    for place, end in (("here", ""), ("there", "end")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "a.txt").write_text("".join(TEXTS) + end)
        write_tokenizer(tmp_path / place, special=("<s>", f"</s{end}>"))
    data = [f"--training.dataset_path={tmp_path}/here/*.txt", f"--model.tokenizer_path={tmp_path}/here/tokenizer.json"]
    second = Rank(mounts={tmp_path / "here": tmp_path / "there"})
    first, data_sentence, tokenizer = refusal(*train(hosts, tmp_path, second, "--training.dataset=text", *data))
    assert first == "HostsDiffer: the hosts of this job do not fit together:"
    size = len("".join(TEXTS).encode())
    assert re.fullmatch(
        rf"the data: expected text, 1 file, {size:,} bytes, digest \w+, as rank 0 on host-2 has it, found text, "
        rf"1 file, {size + 3:,} bytes, digest \w+ on rank 1 on host-3\. Give all hosts the same files\.",
        data_sentence,
    )
    assert re.fullmatch(r"the tokenizer: expected \w+, as .*, found \w+ on rank 1 on host-3\. Give .*", tokenizer)
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_a_folder_of_tokens_of_its_own_is_a_warning(hosts: Hosts, tmp_path: Path) -> None:
    for folder in ("tokens", "other", "texts"):
        (tmp_path / folder).mkdir()
    (tmp_path / "texts" / "a.txt").write_text("".join(TEXTS))
    data = ["--training.dataset=text", f"--training.dataset_path={tmp_path}/texts/*", "--checkpoint.interval=1"]
    options = [f"--model.tokenizer_path={write_tokenizer(tmp_path)}", f"--training.tokens_folder={tmp_path}/tokens"]
    codes, logs = train(hosts, tmp_path, Rank(mounts={tmp_path / "tokens": tmp_path / "other"}), *data, *options)
    assert codes == [0, 0], logs
    (line,) = (line for line in logs[0].splitlines() if " - WARNING - the file of tokens " in line)
    inode = r"inode \d+ of \d+ ns"
    assert re.search(
        rf" {tmp_path}/tokens/\w+/tokens: expected {inode}, as rank 0 on host-2 has it, found {inode} on rank 1 on "
        r"host-3\. To make them once, name a folder that all hosts share in --training\.tokens_folder\.",
        line,
    )
    assert "the file of tokens" not in logs[1]


@pytest.mark.promise("A start whose ranks see different folders is refused on all ranks.", section="writer")
def test_other_folders_of_checkpoints_and_of_exports_and_another_clock(hosts: Hosts, tmp_path: Path) -> None:
    for place in ("run/checkpoint", "run/export", "other/checkpoint", "other/export", "ahead"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    mounts = {tmp_path / "run" / name: tmp_path / "other" / name for name in ("checkpoint", "export")}
    options = ["--checkpoint.export_folder=export", "--checkpoint.keep_for_hours=1", "--checkpoint.timeout_seconds=8"]
    first, *sentences, clock = refusal(*train(hosts, tmp_path, Rank(mounts=mounts, path=f"{tmp_path}/ahead"), *options))
    assert first == "HostsDiffer: the hosts of this job do not fit together:"
    for name, sentence in zip(("checkpoint", "export"), sentences, strict=True):
        folder = tmp_path / "run" / name
        assert re.fullmatch(
            rf"the ranks do not share one folder for checkpoints: what rank 0 on host-2 wrote into {folder} \([^()]+\) "
            rf"is not seen by rank 1 on host-3 \({folder}, \S+ \S+\[.*/other/{name}\] at {folder}\)\. Name one that .*",
            sentence,
        )
    assert re.fullmatch(
        r"The clock of rank 1 on host-3 is ahead of that of rank 0 on host-2 by (5000|4999|4998) s, expected less than "
        r"60 s\. Synchronise the clocks of all hosts \(NTP\)\.",
        clock,
    )
    assert not [*tmp_path.glob("*/*/step-*")]


def test_hosts_that_fit_train_without_a_word_about_it(hosts: Hosts, tmp_path: Path) -> None:
    codes, logs = train(hosts, tmp_path, Rank(["--profiling.profile_freq=11", "--job.description=second"]))
    assert codes == [0, 0], logs
    assert not [line for log in logs for line in log.splitlines() if " on host-" in line]
