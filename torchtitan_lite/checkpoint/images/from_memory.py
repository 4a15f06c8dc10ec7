"""The choice between the images in memory and what is on disk. Coordinator only.

A pure rule (belonging.py) decides for each image; here are the facts that it needs, and what a load then takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torchtitan_lite.checkpoint.images.assembled import same_contents
from torchtitan_lite.checkpoint.images.belonging import ChosenOnDisk, OnDisk, why_not
from torchtitan_lite.checkpoint.images.commits import Commit, commit_of, rests_in
from torchtitan_lite.checkpoint.images.held_images import Complete, HeldImages
from torchtitan_lite.checkpoint.images.image_source import ImageSource
from torchtitan_lite.checkpoint.reading.complete_manifest import complete_manifest
from torchtitan_lite.checkpoint.reading.files import files_of
from torchtitan_lite.checkpoint.reading.source import LoadSource, RunFacts
from torchtitan_lite.checkpoint.resume.load_source import with_exclusions
from torchtitan_lite.checkpoint.schedule.interval import BEGINNING
from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import CheckpointError
from torchtitan_lite.log import logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind
from torchtitan_lite.store.manifest_fields import START, TRAINED_SECONDS
from torchtitan_lite.store.protocol import StoresCheckpoints


def prefer_memory(
    images: HeldImages,
    store: StoresCheckpoints,
    chosen: LoadSource | None,
    wanted: int,
    config: Checkpoint,
    *,
    is_exact: bool,
) -> LoadSource | None:
    """Return the source in memory that goes before `chosen`, which is what the disk has; else `chosen`."""
    if config.load_only or not images.complete:
        return chosen
    disk = _facts(store, chosen, wanted, config, is_exact=is_exact)
    for each in images.complete:
        if each.key in images.left_out:
            continue
        reason = why_not(each.image, disk) or _difference(each, chosen)
        if not reason:
            return _source(each, store, chosen, config)
        logger.info("The image of step %d in memory is not used: %s", each.key.step, reason)
    return chosen


def _latest_commit(store: StoresCheckpoints) -> tuple[Commit | None, str]:
    """Return the full checkpoint of `store` with the highest step and the start that made it; None without one."""
    full = [info for info in store.committed() if info.kind is CheckpointKind.FULL]
    if not full:
        return None, ""
    manifest = files_of(full[-1].path).manifest()
    return commit_of(full[-1]), manifest.extra.get(START, "") if manifest is not None else ""


def _facts(
    store: StoresCheckpoints, chosen: LoadSource | None, wanted: int, config: Checkpoint, *, is_exact: bool
) -> OnDisk:
    latest, start = _latest_commit(store)
    of_run = chosen is not None and not chosen.initial
    return OnDisk(
        folder_id=store.folder_id(make=False),
        latest=latest,
        latest_start=start,
        rests=rests_in(store),
        abandoned=frozenset(step for info in store.intact() for step, _ in info.lineage.abandons),
        wanted=wanted,
        is_exact=is_exact,
        new_branch=config.new_branch,
        chosen=ChosenOnDisk(
            step=chosen.step,
            run_id=chosen.lineage.run_id,
            begins_branch=chosen.is_explicit,
            branch_point=chosen.lineage.branch_point,
            counts_again=chosen.lineage.counts_again,
            left=chosen.lineage.ancestors,
        )
        if chosen is not None and of_run
        else None,
    )


def _difference(each: Complete, chosen: LoadSource | None) -> str:
    """Return why images of the step that is `chosen` on disk are no copy of it; empty for those of other steps."""
    if chosen is None or not _is_copy(each, chosen):
        return ""
    try:
        manifest = complete_manifest(files_of(chosen.path), chosen.path)
        if manifest is not None and same_contents(manifest, each.manifest):
            return ""
    except (CheckpointError, OSError):
        pass
    return "that step on disk has other contents"


def _is_copy(each: Complete, chosen: LoadSource) -> bool:
    """Return whether the images should be a copy of `chosen`: of the same step, unless the run counts again."""
    return not chosen.initial and not chosen.lineage.counts_again and chosen.step == each.key.step


def _source(each: Complete, store: StoresCheckpoints, chosen: LoadSource | None, config: Checkpoint) -> LoadSource:
    manifest, key = each.manifest, each.key
    has_other = chosen is not None and not chosen.model_only and not chosen.initial
    # Next to a run that counts again the disk would not restore all that a load changes.
    counts_again = chosen is not None and not chosen.initial and chosen.lineage.counts_again
    offered: dict[str, Any] = {
        "key": key,
        "manifest": manifest.to_json(),
        "is_spread": each.is_spread,
        "is_last_resort": not has_other or counts_again,
        "durable": BEGINNING if chosen is None else chosen.loaded,
    }
    if chosen is not None and _is_copy(each, chosen):
        of_disk = {field.name: getattr(chosen, field.name) for field in dataclasses.fields(chosen)}
        return ImageSource(**of_disk, **offered, is_copy=True)
    # The run continues as the one that made the image; its latest ancestor on disk is what the disk's choice loads.
    parent = None if chosen is None else chosen.lineage.parent_step
    lineage = dataclasses.replace(
        manifest.lineage,
        parent_step=parent,
        abandons=(),
        counts_again=counts_again,
        rolls_back_to=None if chosen is None else chosen.lineage.rolls_back_to,
    )
    source = ImageSource(
        store.place_of(layout.step_dir(key.step)),
        key.step,
        model_only=False,
        lineage=lineage,
        nbytes=manifest.nbytes,
        recorded=RunFacts(
            manifest.extra["topology"], manifest.extra["config"], trained_seconds=manifest.extra[TRAINED_SECONDS]
        ),
        **offered,
    )
    return with_exclusions(source, config)
