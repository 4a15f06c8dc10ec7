"""torchtitan's own trainer, on processors, with our manager: the lines that its users type, and what they find."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.e2e.jobs import free_port
from tests.processes import children, send, wait_until
from torchtitan_lite.checkpoint.examining.opened import open_checkpoint
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.manifest import Manifest

pytestmark = [
    pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 6
DEADLINE_SECONDS = 300.0
"""For a start that compiles its first step."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the corpus and the tokenizer that torchtitan's debug model wants."""
    place, drawn = tmp_path_factory.mktemp("titan"), random.Random(0)
    words = ["".join(drawn.choices("abcdefghijklmnop", k=drawn.randint(2, 8))) for _ in range(300)]
    texts = [" ".join(drawn.choices(words, k=120)) for _ in range(200)]
    corpus, assets = place / "tests/assets/c4_test/data.json", place / "tests/assets/tokenizer"
    for folder in (corpus.parent, assets):
        folder.mkdir(parents=True)
    lines = [json.dumps({"text": text, "timestamp": "2020-01-01T00:00:00Z", "url": ""}) for text in texts]
    corpus.write_text("\n".join(lines) + "\n")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return place


class TitanJob:
    """A run of torchtitan's trainer by torchrun, in `place`, that saves into the folder `name`."""

    def __init__(self, place: Path, name: str, ranks: int, options: Sequence[str]) -> None:
        self.folder = place / name / "checkpoint"
        self.log_path = place / f"{name}.log"
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
        common = ["--checkpoint.enable", f"--training.steps={STEPS}", "--debug.seed=1", f"--dump_folder={name}"]
        needed_on_cpus = ["--parallelism.spmd_backend=partial_dtensor"]
        module = ["--module", "titan_config", "--config", "small"]
        command = [sys.executable, *torchrun, str(HERE / "titan_on_cpu.py"), *module, *common, *needed_on_cpus]
        paths = [str(ROOT), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *options], cwd=place, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def losses(self) -> dict[int, str]:
        return {int(step): loss for step, loss in re.findall(r"step:\s+(\d+)\s.*?loss:\s+([\d.]+)", self.log)}

    @property
    def steps(self) -> list[int]:
        """The committed steps."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder.glob("step-*[0-9]"))

    def wait_for_log(self, text: str) -> None:
        is_over = self.process.poll
        assert wait_until(lambda: text in self.log, lambda: self.log, lambda: is_over() is not None, DEADLINE_SECONDS)

    def wait(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)


@contextmanager
def start(place: Path, name: str, *options: str, ranks: int = 2) -> Iterator[TitanJob]:
    job = TitanJob(place, name, ranks, options)
    try:
        yield job
    finally:
        for pid in [job.process.pid, *children(job.process.pid)]:
            send(pid, signal.SIGKILL)
        job.process.wait()


def tensors_differ(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors whose digests in the manifests differ."""
    first, second = (Manifest.of_folder(folder) for folder in (one, other))
    assert first is not None and second is not None
    digests = [manifest.extra["tensor_digests"] for manifest in (first, second)]
    assert digests[0].keys() == digests[1].keys()
    return [name for name, digest in digests[0].items() if digests[1][name] != digest]


MODES = [
    "async",
    pytest.param("disabled", marks=pytest.mark.exhaustive),
    pytest.param("async_with_pinned_mem", marks=pytest.mark.exhaustive),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_has_the_state_and_losses_of_one_that_was_not(mode: str, ranks: int, place: Path) -> None:
    is_killed_and_resumed(place, f"{mode}-{ranks}", ranks, [f"--checkpoint.async_mode={mode}"])


@pytest.mark.exhaustive
def test_a_killed_run_with_tensor_parallelism_has_them_too(place: Path) -> None:
    # Pipeline parallelism of torchtitan 0.3.0 calls schedules of a newer torch.
    is_killed_and_resumed(place, "tp", 2, ["--parallelism.tensor_parallel_degree=2"])


def is_killed_and_resumed(place: Path, name: str, ranks: int, options: Sequence[str]) -> None:
    """Fail unless a run that is killed after step 4 and started again ends like a straight one."""
    digests = "--checkpoint.digest_tensors=save"
    with start(place, f"straight-{name}", *options, digests, ranks=ranks) as straight:
        assert straight.wait() == 0, straight.log
    with start(place, f"killed-{name}", *options, digests, ranks=ranks) as killed:
        killed.wait_for_log("Saved step 4")
    with start(place, f"killed-{name}", *options, digests, ranks=ranks) as resumed:
        assert resumed.wait() == 0, resumed.log
    assert straight.steps == resumed.steps == [2, 4, 6]
    assert resumed.losses == {step: straight.losses[step] for step in (5, 6)}
    # torchtitan seeds neither Python's generator nor NumPy's: each run has others, which it keeps.
    differ = tensors_differ(straight.folder / "step-6", resumed.folder / "step-6")
    assert {name.rpartition(".")[2] for name in differ} <= {"python", "numpy"}


@pytest.mark.slow
def test_on_sigterm_all_ranks_save_the_same_step_and_leave_with_143(place: Path) -> None:
    options = ["--training.steps=100000", "--checkpoint.interval=100000", "--metrics.enable_tensorboard"]
    with start(place, "signalled", *options) as job:
        job.wait_for_log("step:  3")
        for pid in children(job.process.pid):
            send(pid, signal.SIGTERM)
        assert job.wait() == 1, "torchrun says 1"
        assert job.log.count("exitcode  : 143") == 2
    [step] = job.steps
    assert open_checkpoint(job.folder / f"step-{step}").manifest is not None
    with start(place, "signalled", *options) as again:
        again.wait_for_log(f"step: {step + 1:2}")


@pytest.mark.exhaustive
def test_a_run_of_one_rank_continues_on_two_with_its_data_from_the_start(place: Path) -> None:
    with start(place, "wider", "--training.steps=2", ranks=1) as job:
        assert job.wait() == 0, job.log
    with start(place, "wider", ranks=2) as job:
        assert job.wait() == 1
        assert "dataloader: expected 1 data-parallel ranks, as saved, found 2" in job.log
    with start(place, "wider", "--checkpoint.exclude_from_loading=dataloader", ranks=2) as job:
        assert job.wait() == 0, job.log
    assert sorted(job.losses) == [3, 4, 5, 6]
    assert job.steps == [2, 4, 6]


STILL = ("warmup", "total")
"""Steps of the schedule which keep the learning rate near zero if they are many."""


@pytest.mark.slow
def test_the_last_weights_are_written_for_hugging_face_and_begin_another_run(place: Path) -> None:
    options = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf", "--checkpoint.interval=100"]
    with start(place, "exported", *options, "--training.steps=2") as job:
        assert job.wait() == 0, job.log
    assert job.steps == [2]
    written = place / "exported" / "hf" / "step-2"
    [file] = written.glob("*.safetensors")
    weights, saved = load_file(file), dcp_tensors(job.folder / "step-2")
    assert weights["model.norm.weight"].equal(saved["norm.weight"])
    assert sum(each.numel() for each in weights.values()) == sum(each.numel() for each in saved.values())
    begin = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={written}", "--training.steps=1"]
    with start(place, "begun", *begin, *(f"--lr_scheduler.{name}_steps=1000000000000" for name in STILL)) as job:
        assert job.wait() == 0, job.log
    assert f"from {written}" in job.log
    begun = dcp_tensors(job.folder / "step-1")
    # After one step of next to no learning rate.
    assert all(torch.allclose(begun[f"model.{name}"], each, rtol=0, atol=1e-12) for name, each in saved.items())


def dcp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, as DCP itself reads them."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size) for name, each in metadata.items() if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder)
    return tensors


def test_a_dataloader_that_holds_code_is_refused_by_name() -> None:
    from torchtitan_lite.integrations.torchtitan import CheckedDataloader

    class Hostile:
        def __reduce__(self) -> Any:
            return os.system, ("echo hostile",)

    given: list[Any] = []
    loader = SimpleNamespace(dp_world_size=2, load_state_dict=given.append, state_dict=dict)
    checked = CheckedDataloader(loader)
    plain = {"dp_rank_0": pickle.dumps({"n": [1, 2.5, "text", None, True], "m": {}}), "world_size": 2}
    checked.load_state_dict(plain)
    assert given == [plain]
    with pytest.raises(ConfigError, match=r"dataloader\.dp_rank_0: expected a pickle of lists.*exclude_from_loading"):
        checked.load_state_dict({"dp_rank_0": pickle.dumps(Hostile()), "world_size": 2})
    with pytest.raises(ConfigError, match="expected 4 data-parallel ranks, as saved, found 2"):
        checked.load_state_dict({**plain, "world_size": 4})
    assert given == [plain]


def test_another_module_configuration_or_manager_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_lite.integrations import torchtitan as integration

    with pytest.raises(ConfigError, match="--module: expected a module of torchtitan or an own one, found 'llama0'"):
        integration._function("llama0", "debug")
    with pytest.raises(ConfigError, match=r"--config: expected a function of .*llama3.*, found 'llama3_none'"):
        integration._function("llama3", "llama3_none")
    with pytest.raises(ConfigError, match="found one with int"):
        integration.of_torchtitan(3)
    monkeypatch.setattr(integration, "registry", "llama3")
    config = integration.llama3_debugmodel()
    assert type(config.checkpoint) is integration.CheckpointManager.Config
    assert (config.checkpoint.interval, config.checkpoint.last_save_model_only) == (10, False)


def test_one_checkpoint_may_be_kept_and_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    from torchtitan_lite.integrations.torchtitan import CheckpointManager

    assert CheckpointManager.Config(keep_latest_k=1).keep_latest_k == 1
    with pytest.raises(ValueError, match="negative"):
        CheckpointManager.Config(keep_latest_k=-1)
    given: dict[str, Any] = dict.fromkeys(("dataloader", "optimizers", "lr_schedulers", "sd_adapter"))
    disabled = CheckpointManager.Config(last_save_in_hf=True).build(model_parts=[], states={}, **given)
    assert not disabled.load() and not disabled.save(1)
    disabled.close()
    config = CheckpointManager.Config(enable=True, last_save_in_hf=True, folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"last_save_in_hf: expected a model with an adapter .* found no adapter"):
        config.build(model_parts=[torch.nn.Linear(1, 1)], states={}, **given | {"optimizers": [], "lr_schedulers": []})
