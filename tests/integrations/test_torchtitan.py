"""torchtitan's own trainer, on processors, with our manager: the lines that its users type, and what they find."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.e2e.jobs import free_port
from tests.integrations import titan_cases
from tests.integrations.served import Ended, Served, served
from tests.integrations.titan_place import SMALL, with_data
from tests.processes import children, send, wait_until
from tests.titan_packages import environment, needs_torchtitan
from torchtitan_lite.cli.app import main as cli
from torchtitan_lite.examining.opened import open_checkpoint
from torchtitan_lite.store.manifest import Manifest

pytestmark = needs_torchtitan
HERE = Path(__file__).parent
DEADLINE_SECONDS = 300.0
COMMON = (*SMALL, "--checkpoint.interval=3")
STEPS = 12


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_data(tmp_path_factory.mktemp("titan"))


class Titan:
    """Runs of torchtitan's trainer in one working directory."""

    def __init__(self, server: Served, place: Path) -> None:
        self._server, self.place, self._logs = server, place, count()
        self.straight = cache(self._straight)

    def run(
        self, name: str, ranks: int, *options: str, steps: int = STEPS, kill_at: int = 0, own: bool = False
    ) -> Ended:
        """Train until `steps`, with checkpoints in the folder `name`, by torchtitan's own manager with `own`."""
        arguments = [*COMMON, f"--dump_folder={name}", f"--training.steps={steps}", *options]
        log = self.place / f"{next(self._logs)}.log"
        return self._server.run(log, ranks, place=self.place, arguments=arguments, kill_at=kill_at, own=own)

    def check(self, case: str) -> Ended:
        """Call the function `case` of titan_cases.py where torchtitan is loaded."""
        log = self.place / f"{case}.log"
        return self._server.call("check", log, case=case, folder=self.place)

    def _straight(self, ranks: int, *options: str) -> tuple[Ended, Path]:
        """Return a run that was not killed, and the folder of its last step."""
        name = f"straight-{next(self._logs)}"
        ended = self.run(name, ranks, *options)
        assert ended.codes == [0] * ranks, ended.output
        return ended, self.folder(name) / f"step-{STEPS}"

    def folder(self, name: str) -> Path:
        return self.place / name / "checkpoint"

    def steps(self, name: str) -> list[int]:
        """The committed steps."""
        return sorted(int(path.name.removeprefix("step-")) for path in self.folder(name).glob("step-*[0-9]"))


@pytest.fixture(scope="module")
def titan(place: Path) -> Iterator[Titan]:
    with served("titan_on_cpu", environment(HF_HOME=place / "cache")) as server:
        yield Titan(server, place)


MODES = ["disabled", "async", "async_with_pinned_mem"]
PIPELINE = (
    *("--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"),
    "--training.disable_cuda_graphs",
)
CASES: dict[str, tuple[int, Sequence[str]]] = {
    **{f"{mode}, {ranks} ranks": (ranks, [f"--checkpoint.async_mode={mode}"]) for mode in MODES for ranks in (1, 2)},
    "tensor parallelism": (2, ["--parallelism.tensor_parallel_degree=2"]),
    "pipeline parallelism": (2, PIPELINE),
}
IN_ALL = ["async, 2 ranks"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in IN_ALL else pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_a_killed_run_has_the_losses_and_the_state_of_one_that_was_not(
    case: str, titan: Titan, draw: random.Random
) -> None:
    ranks, options = CASES[case]
    digests = "--checkpoint.digest_tensors=save"
    without_mode = [option for option in options if "async_mode" not in option]
    straight, last = titan.straight(ranks, *without_mode, digests)
    killed = titan.run(case, ranks, *options, digests, kill_at=draw.randint(5, STEPS - 1))
    assert killed.codes == [-signal.SIGKILL] * ranks, killed.output
    resumed = titan.run(case, ranks, *options, digests)
    assert resumed.codes == [0] * ranks, resumed.output
    assert resumed.first_step > 1
    assert killed.losses | resumed.losses == straight.losses
    # torchtitan seeds neither Python's generator nor NumPy's: each run has others, which it keeps.
    differ = tensors_differ(last, titan.folder(case) / f"step-{STEPS}")
    assert {name.rpartition(".")[2] for name in differ} <= {"python", "numpy"}


def test_a_killed_run_of_one_rank_trains_the_same_steps_again(titan: Titan) -> None:
    """As above, in two short runs: the losses between the save and the kill are those of the resumed run."""
    options = ["--checkpoint.async_mode=async", "--checkpoint.keep_latest_k=1"]
    killed = titan.run("short", 1, *options, steps=9, kill_at=8)
    resumed = titan.run("short", 1, *options, steps=9)
    assert (killed.codes, resumed.codes) == ([-signal.SIGKILL], [0]), resumed.output
    again = killed.losses & resumed.losses
    assert resumed.first_step in (4, 7) and {step for _, step, _ in again} == set(range(resumed.first_step, 9))
    assert titan.steps("short") == [9]


@pytest.mark.parametrize("case", titan_cases.CASES)
def test_in_a_process_with_torchtitan(case: str, titan: Titan) -> None:
    ended = titan.check(case)
    assert ended.codes == [0], ended.output


@contextmanager
def by_torchrun(place: Path, name: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[], str]]]:
    """Train on two ranks of torchrun in the folder `name`; yield its process, and what reads its output."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    command = [sys.executable, *torchrun, str(HERE / "titan_on_cpu.py"), *COMMON, f"--dump_folder={name}", *options]
    path = place / f"{name}.log"
    with path.open("a") as log:
        environ = environment(HF_HOME=place / "cache")
        process = subprocess.Popen(command, cwd=place, env=environ, stdout=log, stderr=subprocess.STDOUT, text=True)
    try:
        yield process, path.read_text
    finally:
        for pid in [process.pid, *children(process.pid)]:
            send(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_on_sigterm_all_ranks_save_the_same_step_and_leave_with_143(titan: Titan) -> None:
    # A save is always in flight.
    saving = ["--checkpoint.interval=1", "--checkpoint.async_mode=async"]
    options = [*saving, "--metrics.enable_tensorboard", "--checkpoint.last_save_model_only"]
    with by_torchrun(titan.place, "signalled", *options, "--training.steps=100000") as (torchrun, log):
        assert wait_until(lambda: "step:  3" in log(), log, lambda: torchrun.poll() is not None, DEADLINE_SECONDS)
        for pid in children(torchrun.pid):
            send(pid, signal.SIGTERM)
        assert torchrun.wait(DEADLINE_SECONDS) == 1, "torchrun says 1"
        assert log().count("exitcode  : 143") == 2
    step = titan.steps("signalled")[-1]
    assert open_checkpoint(titan.folder("signalled") / f"step-{step}").manifest is not None
    [events] = (titan.place / "signalled").rglob("events.out.tfevents.*")
    assert scalars(events)["loss_metrics/global_avg_loss"] == list(range(1, step + 1))
    resumed = titan.run("signalled", 2, *options, steps=step + 2)
    assert resumed.codes == [0, 0], resumed.output
    assert {number for _, number, _ in resumed.losses} == {step + 1, step + 2}


def scalars(events: Path) -> dict[str, list[int]]:
    """Return the steps of each scalar in a file of TensorBoard, all of which can be read."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(events), size_guidance={"scalars": 0}).Reload()
    return {name: [each.step for each in read.Scalars(name)] for name in read.Tags()["scalars"]}


@pytest.mark.exhaustive
def test_a_run_of_one_rank_continues_on_two_with_its_data_from_the_start(titan: Titan) -> None:
    first = titan.run("wider", 1, steps=2)
    assert first.codes == [0], first.output
    refused = titan.run("wider", 2, steps=6)
    assert refused.codes == [1, 1]
    assert "dataloader: expected 1 data-parallel ranks, as saved, found 2" in refused.output
    wider = titan.run("wider", 2, "--checkpoint.exclude_from_loading=dataloader", steps=6)
    assert wider.codes == [0, 0], wider.output
    assert {step for _, step, _ in wider.losses} == {3, 4, 5, 6}
    assert titan.steps("wider") == [2, 3, 6]


@pytest.mark.exhaustive
def test_torchtitans_own_checkpoints_are_continued_and_ours_by_its_manager(titan: Titan) -> None:
    ahead = "--checkpoint.no-initial_load_model_only"
    theirs = titan.run("theirs", 2, steps=12, own=True)
    assert theirs.codes == [0, 0], theirs.output
    begin = f"--checkpoint.initial_load_path={titan.folder('theirs') / 'step-6'}"
    ours = titan.run("of-theirs", 2, begin, ahead, "--checkpoint.async_mode=disabled", steps=12, kill_at=9)
    assert ours.codes == [-signal.SIGKILL] * 2, ours.output
    assert continued(ours, theirs, range(7, 10))
    arguments = ["convert", f"{titan.folder('of-theirs')}:9", f"{titan.folder('of-ours')}/step-9"]
    assert cli([*arguments, "--layout", "torchtitan", "--dp-ranks", "2"]) == 0
    back = titan.run("of-ours", 2, steps=12, own=True)
    assert back.codes == [0, 0], back.output
    assert continued(back, theirs, range(10, 13))


def continued(run: Ended, straight: Ended, steps: range) -> bool:
    """Return whether `run` trained `steps`, with the losses of `straight`."""
    expected = {key: count for key, count in straight.losses.items() if key[1] in steps}
    return run.losses == expected and len(expected) > 0


@pytest.mark.exhaustive
def test_torchtitans_own_manager_saves_no_generators(titan: Titan) -> None:
    """What the documentation says of it: without dropout its losses are equal, too."""
    straight = titan.run("own-straight", 2, own=True, steps=9)
    killed = titan.run("own", 2, own=True, steps=9, kill_at=8)
    resumed = titan.run("own", 2, own=True, steps=9)
    assert (straight.codes, killed.codes, resumed.codes) == ([0, 0], [-9, -9], [0, 0]), resumed.output
    assert continued(resumed, straight, range(7, 10))
    names = FileSystemReader(titan.folder("own") / "step-9").read_metadata().state_dict_metadata
    assert not [name for name in names if "rng" in name]


@pytest.mark.exhaustive
def test_a_seed_checkpoint_a_step_and_validation_are_as_torchtitan_has_them(titan: Titan) -> None:
    seed = titan.run("seed", 1, "--checkpoint.create_seed_checkpoint")
    assert seed.codes == [0] and titan.steps("seed") == [0], seed.output
    validated = ["--validator.enable", "--validator.freq=2", "--validator.steps=1"]
    validated += ["--validator.dataloader.dataset=c4_test", "--validator.dataloader.infinite"]
    straight = titan.run("seed", 2, *validated, "--checkpoint.enable_first_step_checkpoint", steps=6)
    assert straight.codes == [0, 0] and titan.steps("seed") == [0, 1, 3, 6], straight.output
    looked = titan.run("seed", 2, *validated, "--checkpoint.load_step=3", "--checkpoint.load_only", steps=6)
    assert looked.codes == [0, 0] and titan.steps("seed") == [0, 1, 3, 6], looked.output
    assert continued(looked, straight, range(4, 7))


STILL = ("warmup", "total")
"""Steps of the schedule which keep the learning rate near zero if they are many."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_last_weights_are_written_for_hugging_face_and_begin_another_run(titan: Titan) -> None:
    options = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf", "--checkpoint.interval=100"]
    exported = titan.run("exported", 2, *options, steps=2)
    assert exported.codes == [0, 0], exported.output
    assert titan.steps("exported") == [2]
    written = titan.place / "exported" / "hf" / "step-2"
    [file] = written.glob("*.safetensors")
    weights, saved = load_file(file), dcp_tensors(titan.folder("exported") / "step-2")
    assert weights["model.norm.weight"].equal(saved["norm.weight"])
    assert sum(each.numel() for each in weights.values()) == sum(each.numel() for each in saved.values())
    begin = ["--checkpoint.initial_load_in_hf", f"--checkpoint.initial_load_path={written}"]
    begun = titan.run("begun", 2, *begin, *(f"--lr_scheduler.{name}_steps=1000000000000" for name in STILL), steps=1)
    assert begun.codes == [0, 0], begun.output
    assert f"from {written}" in begun.output
    values = dcp_tensors(titan.folder("begun") / "step-1")
    # After one step of next to no learning rate.
    assert all(torch.allclose(values[f"model.{name}"], each, rtol=0, atol=1e-12) for name, each in saved.items())


def tensors_differ(one: Path, other: Path) -> list[str]:
    """Return the names of the tensors whose digests in the manifests differ."""
    first, second = (Manifest.of_folder(folder) for folder in (one, other))
    assert first is not None and second is not None
    digests = [manifest.extra["tensor_digests"] for manifest in (first, second)]
    assert digests[0].keys() == digests[1].keys()
    return [name for name, digest in digests[0].items() if digests[1][name] != digest]


def dcp_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, as DCP itself reads them."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(each.size) for name, each in metadata.items() if isinstance(each, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder)
    return tensors
