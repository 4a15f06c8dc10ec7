"""DCP's `.metadata` of a checkpoint that was saved without: made from the tables of its manifest.

It is what the save would have written, to the byte. The manifest does not change: it has no record of this file, which
only DCP's readers use.
"""

from __future__ import annotations

from torchtitan_lite.checkpoint.format.metadata_file import PlacedItem, metadata_head, metadata_tail
from torchtitan_lite.checkpoint.format.structure import paths_of
from torchtitan_lite.checkpoint.reading.folder import CheckpointFolder
from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest_fields import DCP_METADATA


def lacks_metadata(folder: CheckpointFolder) -> bool:
    """Return whether the checkpoint in `folder` was saved without `.metadata`. Raises as `folder.manifest_alone`."""
    manifest = folder.manifest_alone
    return manifest is not None and DCP_METADATA in manifest.extra


def metadata_of(folder: CheckpointFolder) -> bytes:
    """Return the `.metadata` of such a checkpoint; `folder` has the dtypes of torch.

    Raises as `folder.contents_alone`.
    """
    manifest, contents = folder.manifest_alone, folder.contents_alone
    if manifest is None or contents.structure is None:
        raise CheckpointDamaged(str(folder.path), f"{layout.MANIFEST}: it has no tables")
    placed: list[PlacedItem] = []
    for key, entry in manifest.objects.items():
        if "item" not in entry:
            raise CheckpointDamaged(str(folder.path), f"{layout.MANIFEST}: the place of {key} is missing")
        file, at, num_bytes = entry["item"]
        placed.append((key, file, at, num_bytes))
    paths = paths_of(contents.structure, tensors=contents.tensors)
    return b"".join([*metadata_head(contents.tensors, contents.objects, paths), *metadata_tail(placed)])
