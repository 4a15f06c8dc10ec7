"""What a forked child must not go on with: processes, sockets and saves that are its parent's.

A child (os.fork, a multiprocessing pool, a loader's worker) has a copy of every object and descriptor,
and none of the threads. What it held on to would keep a writer process alive, and what it closed or
waited for in good order would be its parent's, or would never come.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HeldByOne(Protocol):
    """Something of one process."""

    def forget(self) -> None:
        """Be as if nothing had been begun; nothing of the parent's may change. Called in a child."""


_HELD: weakref.WeakSet[HeldByOne] = weakref.WeakSet()


def forget_in_children(held: HeldByOne) -> None:
    """Have `held.forget()` called in every child that this process forks."""
    _HELD.add(held)


def _forget_all() -> None:
    for held in list(_HELD):
        held.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
