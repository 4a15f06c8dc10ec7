"""The companions of a run, as its configuration names them: the only place in this package that knows what they are.

Each is imported only where it is used: a run without it loads none of its code.
"""

from __future__ import annotations

from torchtitan_lite.checkpoint.context import RunContext
from torchtitan_lite.checkpoint.planning.plan_cache import PlanCache
from torchtitan_lite.checkpoint.run_folders import RunFolders
from torchtitan_lite.checkpoint.saving.companion import Companion
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.distributed.environment import memory_is_off
from torchtitan_lite.store.protocol import StoresCheckpoints
from torchtitan_lite.store.retention import KeepAll, RetentionPolicy


def build_companions(
    folders: RunFolders, retention: RetentionPolicy | None, plans: PlanCache, context: RunContext
) -> list[Companion]:
    """Return what accompanies the run that saves into `folders`; images come first. Touches nothing.

    `retention` says which checkpoints stay in the second folder, None: all.
    """
    return [*images(folders.checkpoints, plans, context), *_uploads(folders, retention, context)]


def images(store: StoresCheckpoints, plans: PlanCache, context: RunContext) -> list[Companion]:
    """Return what the run keeps in memory: nothing unless it is a run that saves, and the memory is to be kept."""
    config = context.config
    # What a keeper holds is compared with the folder on its host's disk; a bucket belongs to no host.
    if not (_saves(config) and config.memory_ttl_seconds) or memory_is_off() or store.root is None:
        return []
    from torchtitan_lite.memory.images.run_images import build_run_images

    return [build_run_images(store, store.root, plans, context)]


def _uploads(folders: RunFolders, retention: RetentionPolicy | None, context: RunContext) -> list[Companion]:
    """Return what uploads the checkpoints of `folders`, and loads uploaded ones."""
    config, source = context.config, folders.checkpoints
    if folders.uploads is None or not config.enable_checkpoint or source.root is None:
        return []
    from torchtitan_lite.uploads import UploadFolder, Uploads

    if not _saves(config):
        return [UploadFolder(folders.uploads)]
    return [Uploads(source, source.root, folders.uploads, retention or KeepAll(), context)]


def _saves(config: Checkpoint) -> bool:
    return config.enable_checkpoint and not (config.load_only or config.create_seed_checkpoint or config.dry_run)
