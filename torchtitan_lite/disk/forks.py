"""State that a forked child must drop: processes, sockets and saves of its parent.

A child (os.fork, a multiprocessing pool, a worker of a data loader) has a copy of every object and descriptor, and none
of the threads. A descriptor that it keeps would keep a writer process alive; closing or waiting in good order would
act on its parent's resources, or wait forever.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

_FORGET: list[weakref.WeakMethod[Callable[[], None]]] = []


def forget_in_children(forget: Callable[[], None]) -> None:
    """Call the method `forget` in every child that this process forks, as long as its object exists.

    It drops the state in the child and leaves the parent's alone.
    """
    # Pruned here and not by a callback, which can run at the interpreter's exit, after what it uses is gone.
    _FORGET[:] = [*(method for method in _FORGET if method() is not None), weakref.WeakMethod(forget)]


def _forget_all() -> None:
    for method in list(_FORGET):
        if (forget := method()) is not None:
            forget()


os.register_at_fork(after_in_child=_forget_all)
