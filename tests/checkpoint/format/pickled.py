"""DCP's metadata that another program made, pickled as ours is."""

from __future__ import annotations

import io

from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_lite.checkpoint.format import metadata_file


def metadata_bytes(metadata: Metadata) -> bytes:
    """Return `metadata` in the form of the oldest supported torch."""
    buffer = io.BytesIO()
    metadata_file._pickler(buffer, 2).dump(metadata)
    return buffer.getvalue()
