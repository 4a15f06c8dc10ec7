"""This project's savers and reader, called the way a run calls them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from checkpoint_bench.contenders import Pending
from checkpoint_bench.states import BenchState, llama_args
from torchtitan_lite.checkpoint.format.flattening import State
from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.checkpoint.reading.files import Files
from torchtitan_lite.checkpoint.reading.folder import Verify
from torchtitan_lite.checkpoint.reading.stored_checkpoint import StoredCheckpoint
from torchtitan_lite.checkpoint.saving.savers import PendingSave, Saver, build_saver
from torchtitan_lite.checkpoint.saving.target import Origin, SaveTarget
from torchtitan_lite.checkpoint.seams import Seams
from torchtitan_lite.checkpoint.state.optimizer_state import ParameterSlot, by_name
from torchtitan_lite.collection import no_collection
from torchtitan_lite.config.job_config import Checkpoint, Job, JobConfig
from torchtitan_lite.config.sections.checkpoint import AsyncMode
from torchtitan_lite.disk import block_writer
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.models.llama.model import Transformer
from torchtitan_lite.store import layout
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.store import CheckpointStore

WHO_SYNCS = "itself: files and folders"
TIMEOUT_SECONDS = 600
MODES: dict[str, AsyncMode] = {"thread": "async", "process": "async_with_pinned_mem"}


@no_collection()
def load(target: BenchState, folder: Path, peers: Peers, verify: Verify, files: Files | None = None) -> None:
    """Load as a resume does: check that everything fits, then read every state. **Collective**."""
    stored = StoredCheckpoint(folder, peers, verify=verify, files=files)
    slots = _slots(target)
    stored.report(target.model, slots, ["train_state"])
    stored.verify_rest()
    target.counters = stored.read_state("train_state", target.counters)
    if slots:
        stored.read_optimizer(slots)
    stored.read_model(target.model)


def _slots(target: BenchState) -> dict[str, ParameterSlot]:
    """Return the parameters of the optimizer in `target` with their live state."""
    states, settings = by_name(target.optimizer, target.model.keys())
    return {
        name: ParameterSlot((name,), (0, 0), target.model[name], settings.get(name, {}), state)
        for name, state in states.items()
    }


class Ours:
    """The saver of async_mode "disabled", and StoredCheckpoint; `digests`: compute digests of writes and reads."""

    who_syncs = WHO_SYNCS

    def __init__(self, *, digests: bool = True) -> None:
        self.name = "ours" if digests else "ours, no digests"
        self._digests = digests
        self._peers = Peers(timedelta(seconds=TIMEOUT_SECONDS))
        self._saver = build_saver(Checkpoint(timeout_seconds=TIMEOUT_SECONDS), self._peers)

    def save(self, state: BenchState, folder: Path) -> None:
        with _digests_if(self._digests):
            self._saver.save(state.nested(), target(folder)).durable.result()

    def load(self, target: BenchState, folder: Path, *, warm: bool) -> None:
        load(target, folder / layout.step_dir(1), self._peers, "full" if self._digests else "off")

    def close(self) -> None:
        self._saver.close(TIMEOUT_SECONDS)


class OursAsync:
    """The saver of an asynchronous mode."""

    who_syncs = WHO_SYNCS

    def __init__(self, mode: str) -> None:
        self.name = f"ours {mode}"
        self._peers = Peers(timedelta(seconds=TIMEOUT_SECONDS))
        config = Checkpoint(async_mode=MODES[mode], timeout_seconds=TIMEOUT_SECONDS)
        self._saver = build_saver(config, self._peers)

    def prepare(self, state: BenchState) -> None:
        self._saver.start()
        self._saver.prepare(state.nested)
        _wait_for_preparation()

    def save(self, state: BenchState, folder: Path) -> Pending:
        pending = self._saver.save(state.nested(), target(folder))
        return Pending(pending.staged.result, pending.durable)

    def settle(self) -> None: ...

    def close(self) -> None:
        self._saver.close(TIMEOUT_SECONDS)


class OursManaged:
    """The CheckpointManager with a writer process, a model and an optimizer; includes gathering the state."""

    name, who_syncs = "ours manager", WHO_SYNCS

    def __init__(self, num_params: int, folder: Path) -> None:
        self._num_params, self._folder = num_params, folder
        self._step = 0

    def prepare(self, state: BenchState) -> None:
        model = Transformer(llama_args(self._num_params)).requires_grad_(True)
        model.load_state_dict(state.model, strict=False, assign=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for name, parameter in model.named_parameters():
            keys = ("step", "exp_avg", "exp_avg_sq")
            optimizer.state[parameter] = {key: state.optimizer[f"state.{name}.{key}"] for key in keys}
        config = Checkpoint(
            enable_checkpoint=True,
            interval=1,
            async_mode=MODES["process"],
            timeout_seconds=TIMEOUT_SECONDS,
            keep_latest_k=1,
            preemption_signals=(),
        )
        self._saver = _Recording(build_saver(config, Peers(timedelta(seconds=TIMEOUT_SECONDS))))
        self._manager = CheckpointManager(
            None,
            [model],
            [optimizer],
            [],
            {},
            JobConfig(job=Job(dump_folder=str(self._folder)), checkpoint=config),
            seams=Seams(saver=self._saver),
        )
        self._manager.reset()
        _wait_for_preparation()

    def save(self, state: BenchState, folder: Path) -> Pending:
        self._step += 1
        self._manager.save(self._step)
        assert self._saver.last is not None
        return Pending(self._manager.maybe_wait_for_staging, self._saver.last.durable)

    def settle(self) -> None:
        self._manager.latest_step()

    def close(self) -> None:
        self._manager.close()


class _Recording:
    """A saver that keeps the last `PendingSave` that it returned."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver
        self.last: PendingSave | None = None

    def start(self) -> None:
        self._saver.start()

    def prepare(self, get_state: Callable[[], State]) -> None:
        self._saver.prepare(get_state)

    def save(self, state: State, target: SaveTarget) -> PendingSave:
        self.last = self._saver.save(state, target)
        return self.last

    def close(self, timeout_seconds: float) -> None:
        self._saver.close(timeout_seconds)


def target(folder: Path) -> SaveTarget:
    """Return the target for step 1 in `folder`."""
    origin = Origin(Lineage("bench"), topology="bench", config={})
    return SaveTarget(CheckpointStore(folder), 1, CheckpointKind.FULL, origin)


@contextmanager
def _digests_if(digests: bool) -> Iterator[None]:
    """Turn the writer's digests off in the block, unless `digests`."""
    writer: Any = block_writer
    kept = writer.digest_blocks
    if not digests:
        writer.digest_blocks = lambda data: b""
    try:
        yield
    finally:
        writer.digest_blocks = kept


def _wait_for_preparation() -> None:
    """Wait until the arena is ready, as it is in a run when the first save is due."""
    for thread in threading.enumerate():
        if thread.name == "staging":
            thread.join()
