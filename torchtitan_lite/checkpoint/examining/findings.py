"""What is wrong with a checkpoint, and which of its tensors are affected."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_lite.checkpoint.format.contents import Contents


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    file: str
    """The file, by name; empty if the finding is about no single one."""
    text: str
    """What is wrong."""
    keys: tuple[str, ...] = ()
    """The tensors and objects that it affects."""


def affected(contents: Contents | None, file: str, begin: float, end: float) -> tuple[str, ...]:
    """Return the keys with bytes in [begin, end) of `file`, in the order of the contents."""
    if contents is None:
        return ()
    found: dict[str, None] = {}
    for key, tensor in contents.tensors.items():
        for chunk in tensor.chunks:
            if chunk.item is not None:
                place = chunk.item
                if place.file == file and place.offset < end and begin < place.offset + place.length:
                    found[key] = None
            elif chunk.file == file and chunk.at is not None:
                last = chunk.at + chunk.numel * tensor.dtype.itemsize
                if chunk.at < end and begin < last:
                    found[key] = None
    for key, stored in contents.objects.items():
        item = stored.item
        if item is not None and item.file == file and item.offset < end and begin < item.offset + item.length:
            found[key] = None
    return tuple(found)
