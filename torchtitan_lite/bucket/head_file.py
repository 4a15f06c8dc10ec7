"""`head.json` in an object store: read, and replaced on condition.

A swap names the version that it was computed from, so it is carried out upon exactly that one or refused. An answer may
be lost after the swap was carried out, and a client that repeats the request then reports a refusal. So after every
failure the head is read again, and the change is made once more of what is there: a change that is in it already
changes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torchtitan_lite.bucket import naming
from torchtitan_lite.bucket.head import Head
from torchtitan_lite.bucket.head_text import WrongDigest, parse, to_text
from torchtitan_lite.bucket.objects import Condition, ConditionFailed, Objects, StoreUnavailable
from torchtitan_lite.errors import FolderUnusable
from torchtitan_lite.store.lease import LeaseClock

DEADLINE_SECONDS = 120.0
"""For one change with all its repetitions. Two deadlines of a request, so one that hung may be repeated."""


@dataclass(frozen=True)
class FoundHead:
    """What was at the place of the head."""

    head: Head | None
    """None if there was nothing, or something damaged."""
    condition: Condition | None
    """For the next write; None if there was nothing."""


class HeadFile:
    """The head of the folder of `objects`. Any thread."""

    def __init__(self, objects: Objects, clock: LeaseClock) -> None:
        self.path = f"{objects.address}/{naming.HEAD}"
        self._objects = objects
        self._clock = clock

    def look(self) -> FoundHead:
        """Return what is there, damaged or not.

        Raises FormatTooNew, FolderUnusable for what is undamaged and no head, and OSError: then nothing is known.
        """
        try:
            found = self._look_once()
            # Twice, because what was read may have been damaged on its way.
            return found if found.head is not None else self._look_once()
        except FileNotFoundError:
            return FoundHead(None, None)

    def read(self) -> tuple[Head, Condition]:
        """Return the head and the condition that it is this version.

        Raises as `look`, FileNotFoundError if there is none, and FolderUnusable if it is damaged.
        """
        found = self.look()
        if found.condition is None:
            raise FileNotFoundError(f"{self.path} does not exist")
        if found.head is None:
            raise FolderUnusable(self.path, "it is damaged; the next start of a job rebuilds it from the manifests")
        return found.head, found.condition

    def write(self, head: Head, condition: Condition | None) -> None:
        """Write `head` in place of the version of `condition`; None: where there is nothing.

        Raises OSError; after `ConditionFailed`, too, the head may be written, by a request whose answer was lost.
        """
        text = to_text(replace(head, change=head.change + 1))
        if condition is None:
            self._objects.put_if_absent(naming.HEAD, text)
        else:
            self._objects.put_if_match(naming.HEAD, text, condition)

    def change(self, make: Callable[[Head], Head]) -> Head:
        """Replace the head by what `make` returns for it, in one swap; return that.

        `make` is called again for each version that is found there after a failure, and returns its argument once its
        change is in it. Raises what `make` raises, what `read` raises, and OSError: the head may be changed then.
        """
        began = self._clock.monotonic()
        for pause in _pauses():
            head, condition = self.read()
            changed = make(head)
            if changed == head:
                return head
            try:
                self.write(changed, condition)
                return changed
            except (ConditionFailed, FileNotFoundError, StoreUnavailable) as error:
                if self._clock.monotonic() - began >= DEADLINE_SECONDS:
                    raise StoreUnavailable(f"{self.path} could not be replaced: {error}") from error
            self._clock.sleep(pause)
        raise AssertionError("the pauses have no end")

    def _look_once(self) -> FoundHead:
        data, condition = self._objects.get(naming.HEAD)
        try:
            return FoundHead(parse(data, self.path), condition)
        except WrongDigest:
            return FoundHead(None, condition)
        except (ValueError, RecursionError) as error:
            # Not damage, so it is not rebuilt: that would lose what it says.
            raise FolderUnusable(self.path, f"{error}; restore it from a copy, or remove it") from error


def _pauses() -> Iterator[float]:
    """Yield the seconds to wait before each repetition."""
    yield from itertools.chain((0.0, 0.1, 0.5, 2.0), itertools.repeat(5.0))
