"""What a forked child must not go on with: processes, sockets and saves that are its parent's.

A child (os.fork, a multiprocessing pool, a loader's worker) has a copy of every object and descriptor,
and none of the threads. What it held on to would keep a writer process alive, and what it closed or
waited for in good order would be its parent's, or would never come.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_FORGET: set[weakref.WeakMethod[Callable[[], None]]] = set()


def forget_in_children(forget: Callable[[], None]) -> None:
    """Have `forget` called in every child that this process forks: nothing was begun there, and its parent's goes on.

    It is a method, which is called while its object is there.
    """
    _FORGET.add(weakref.WeakMethod(forget, _FORGET.discard))


def _forget_all() -> None:
    for method in list(_FORGET):
        if (forget := method()) is not None:
            forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
