"""A `Loader` of torchdata.nodes whose state was read before a load.

To read its state makes an iterator, which its next iteration returns, whatever `load_state_dict` was given in between.
A load has to read the state of a run first, to know its form.
"""

from __future__ import annotations

from typing import Any


def forget_iterator(loader: Any) -> None:
    """Have a `Loader` of torchdata.nodes take its next `load_state_dict`; do nothing to other objects."""
    if any(kind.__module__ == "torchdata.nodes.loader" for kind in type(loader).__mro__):
        loader._it, loader._iter_for_state_dict = None, False
