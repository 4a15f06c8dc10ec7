"""What accompanies the run of a manager."""

from __future__ import annotations

from torchtitan_lite.checkpoint.manager import CheckpointManager
from torchtitan_lite.memory.images.run_images import KeptImages
from torchtitan_lite.uploading.upload_process import UploadProcess
from torchtitan_lite.uploads import Uploads


def kept(manager: CheckpointManager) -> KeptImages | None:
    """Return what keeps images of the run of `manager`; None for a run that makes none."""
    return next((each for each in manager._companions if isinstance(each, KeptImages)), None)


def uploads_of(manager: CheckpointManager) -> Uploads:
    """Return what uploads the checkpoints of `manager`."""
    return next(each for each in manager._companions if isinstance(each, Uploads))


def uploader_of(manager: CheckpointManager) -> UploadProcess:
    """Return the process that uploads them, which was started."""
    process = uploads_of(manager)._process
    assert process is not None
    return process
