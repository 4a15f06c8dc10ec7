"""A device of the tests: memory of this host, to which copies are made as late as they may be."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch


class LateLink:
    """A link to all tensors. A copy is made at a wait for it, or when the caller's work is to follow it.

    With `eager`, those whose numbers are in it are made at once. It refuses bytes that changed while their copy was
    under way, a copy that was begun before the link followed its caller, and copies under way when the pages are
    unlocked. The copy with the number `failing` fails, and the first wait for the one with the number `lost`.
    """

    def __init__(self, eager: Iterable[int] = (), failing: int = -1, lost: int = -1) -> None:
        self.eager, self.failing, self.lost = {*eager}, failing, lost
        self.begun: list[bytes] = []
        """The bytes of each copy that was begun."""
        self.num_calls = 0
        self.locked = self.most_locked = 0
        """Bytes of page-locked memory."""
        self._followed: set[torch.device] = set()
        self._waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor, bytes]]] = {}
        self._under_way: set[int] = set()
        """Copies that may still read their memory: nothing has waited for them."""
        self._unseen = False
        self._lock = threading.Lock()

    def reaches(self, tensor: torch.Tensor) -> bool:
        return True

    def lock(self, memory: memoryview) -> Callable[[], None]:
        self.locked += len(memory)
        self.most_locked = max(self.most_locked, self.locked)

        def unlock() -> None:
            assert not self._under_way, "copies are under way"
            assert not self._unseen, "the caller's work does not follow them"
            self.locked -= len(memory)

        return unlock

    def begin(self, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
            if number == self.failing:
                raise RuntimeError("the device is lost")
            assert {target.device for target, _ in copies} <= self._followed, "it comes before what the caller launched"
            assert all(target.numel() == source.numel() > 0 for target, source in copies)
            self.begun += [source.numpy().tobytes() for _, source in copies]
            self._under_way.add(number)
            self._unseen = True
            self._waiting[number] = [(target, source, _digest(source)) for target, source in copies]
        if number in self.eager:
            self.make(number)
        return partial(self.finish, number)

    def follow(self, devices: Iterable[torch.device]) -> None:
        self._followed |= {*devices}

    def precede(self, devices: Iterable[torch.device]) -> None:
        # What the caller launches from now on, a copy that begins later would not follow.
        self._followed -= {*devices}
        self._unseen = False
        self.make(self.num_calls)

    def end(self, devices: Iterable[torch.device]) -> None:
        self.make(self.num_calls)
        self._under_way.clear()

    def finish(self, number: int) -> None:
        """Wait for the copy with this number."""
        if number == self.lost:
            self.lost = -1
            raise RuntimeError("the device is lost")
        self.make(number)
        self._under_way.discard(number)

    def make(self, number: int) -> None:
        """Make all copies up to this number, in their order."""
        with self._lock:
            for each in sorted(self._waiting):
                if each <= number:
                    for target, source, digest in self._waiting.pop(each):
                        assert _digest(source) == digest, "the memory was used again before its copy had ended"
                        target.copy_(source)


def _digest(tensor: torch.Tensor) -> bytes:
    return hashlib.blake2b(tensor.numpy().tobytes(), digest_size=8).digest()
