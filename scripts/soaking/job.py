"""The script that torchrun starts in a soak: train.py, whose ranks also record what they train.

Each rank appends a line to a file of its own at once, so that the records are complete up to the moment of a kill.
Variables: SOAK_RECORDS, the folder of these files; SOAK_START, the number of the start; SOAK_POISON, batches whose loss
is NaN; SOAK_SKIP, batches that are left out, for a reference; SOAK_PLANT, a defect (`bit` or `leak`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_lite import train, trainer
from torchtitan_lite.events import Finished

VITALS_EVERY = 10
"""Steps from one line with the process's memory, descriptors, threads and mappings to the next."""
LEAKED_BYTES = 256 * 1024
"""That a planted leak keeps of each step, and a descriptor."""
_LEAKED: list[Any] = []


class RecordedTrainer(trainer.Trainer):
    """A trainer that records its steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        rank = os.environ["RANK"]
        path = Path(os.environ["SOAK_RECORDS"], f"rank{rank}.jsonl")
        self._record = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._start = f"{os.environ['SOAK_START']}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._poisoned, self._left_out = _numbers("SOAK_POISON"), _numbers("SOAK_SKIP")
        self._skipped = 0
        self._write("launched", 0, pid=os.getpid())
        super().__init__(*arguments, **options)

    def _write(self, event: str, step: int, /, **more: Any) -> None:
        line = {"start": self._start, "event": event, "step": step, **more, "time": round(time.time(), 3)}
        os.write(self._record, (json.dumps(line, default=str) + "\n").encode())

    def _build_checkpointer(self) -> Any:
        noted = self.metrics.on_event

        def on_event(event: str, step: int, /, **more: Any) -> None:
            self._write(event, step, **more)
            noted(event, step, **more)

        def note(event: Any) -> None:
            if isinstance(event, Finished):
                self._write("finished", event.step)
            whole(event)

        whole = self.metrics.note
        self.metrics.on_event = on_event  # type: ignore[method-assign]
        self.metrics.note = note  # type: ignore[method-assign]
        return super()._build_checkpointer()

    def _train(self) -> int:
        if os.environ.get("SOAK_PLANT") == "bit" and self.train_state.step:
            with torch.no_grad():
                _local(next(self.model_parts[0].parameters())).view(torch.int32).view(-1)[:1] ^= 1
        self._write("begun", self.train_state.step, state=self._digest())
        return super()._train()

    def _next_batch(self) -> Tensor | None:
        while self.train_state.step + 1 + self._skipped in self._left_out:
            next(self.loader)
            self._skipped += 1
        return super()._next_batch()

    def _train_step(self, batch: Tensor) -> None:
        whole = self.forward_backward
        if self.loader.last_positions[0] // self.global_batch_size + 1 in self._poisoned:
            self.forward_backward = lambda batch: _not_a_number(whole(batch))  # type: ignore[assignment]
        try:
            super()._train_step(batch)
        finally:
            self.forward_backward = whole

    def _roll_back(self, error: Any) -> None:
        super()._roll_back(error)
        self._write("rolled_back", self.train_state.step, bad=error.step)

    def _note_progress(self) -> None:
        super()._note_progress()
        step, takes = self.train_state.step, self.plan.dims.takes_data_first(self.world.rank)
        samples = list(self.loader.last_positions) if takes else []
        more: dict[str, Any] = {"vitals": _vitals()} if step % VITALS_EVERY == 0 else {}
        if os.environ.get("SOAK_PLANT") == "leak":
            _LEAKED.append((os.open(os.devnull, os.O_RDONLY), bytearray(os.urandom(LEAKED_BYTES))))
        loss = self.measured["loss"].item()
        self._write("trained", step, loss=loss.hex(), samples=samples, state=self._digest(), **more)

    def _digest(self) -> str:
        """Return a digest of what this rank holds of parameters and optimizer states."""
        digest = xxhash.xxh3_64(str(self.train_state.step).encode())
        for part in self.model_parts:
            for parameter in part.parameters():
                digest.update(_bytes(parameter))
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                for name in sorted(state):
                    digest.update(_bytes(state[name]) if isinstance(state[name], Tensor) else str(state[name]).encode())
        return digest.hexdigest()


def _not_a_number(loss: Tensor | None) -> Tensor | None:
    """Return NaN for a loss; the stages of a pipeline but the last have none."""
    return None if loss is None else loss * float("nan")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _bytes(tensor: Tensor) -> Any:
    return _local(tensor).detach().contiguous().view(-1).view(torch.uint8).numpy()


def _vitals() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    resident = int(status[status.index("VmRSS:") :].split()[1])
    return {
        "kilobytes": resident,
        "descriptors": len([*Path("/proc/self/fd").iterdir()]),
        "threads": len([*Path("/proc/self/task").iterdir()]),
        "mappings": Path("/proc/self/maps").read_text().count("\n"),
    }


def _numbers(variable: str) -> frozenset[int]:
    return frozenset(int(number) for number in os.environ.get(variable, "").split(",") if number)


if __name__ == "__main__":
    trainer.Trainer = RecordedTrainer  # type: ignore[misc]
    sys.exit(train.main())
