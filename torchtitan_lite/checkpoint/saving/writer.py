"""Every rank writes its file into a place of the save's own, and the coordinator commits them.

The ranks agreed before who writes what (planning/plan_cache.py), so a save sends only the digests of each file and the
objects in it. A failure of one rank is raised on every rank.
"""

from __future__ import annotations

import dataclasses
import platform
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils import get_total_norm

import torchtitan_lite
from torchtitan_lite import faults
from torchtitan_lite.checkpoint.format.description import Description, PlacedObject, table_of_objects
from torchtitan_lite.checkpoint.format.flattening import wide_float
from torchtitan_lite.checkpoint.format.tensor_digest import TensorDigest, digest_chunk, finish
from torchtitan_lite.checkpoint.format.torch_contents import DTYPES
from torchtitan_lite.checkpoint.planning.rank_file import RankPlan
from torchtitan_lite.checkpoint.saving.target import RankContent, SaveTarget
from torchtitan_lite.disk.block_writer import in_memory
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.distributed.exchange import Exchange, RanksFailed
from torchtitan_lite.distributed.groups import if_overdue
from torchtitan_lite.distributed.peers import Peers
from torchtitan_lite.errors import LeaseLost, SaveFailed
from torchtitan_lite.log import listed, logger
from torchtitan_lite.store import layout
from torchtitan_lite.store.files_of_ranks import Files, FilesOfRanks, with_rank_files
from torchtitan_lite.store.lineage import Lineage
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind, Manifest, abandoned_by
from torchtitan_lite.store.manifest_fields import (
    CONFIG,
    DCP_METADATA,
    LEFT_OUT,
    METRICS,
    NAN_IN,
    NEVER_FINITE,
    RANKS_DIFFER,
    RESUMED_FROM_MEMORY,
    START,
    TENSOR_DIGESTS,
    TOPOLOGY,
    TRAINED_SECONDS,
)

SLOW_SECONDS = 60.0
"""After which a write is said to be slow."""


class WrittenFile(NamedTuple):
    """A rank's report to the coordinator about the file that it wrote.

    It travels as a plain tuple of plain values, which pickle reads five times as fast.
    """

    size: int
    """Bytes of its file of tensors."""
    blocks: bytes
    """The digests of the blocks of that; empty if they are in its record."""
    record_size: int | None = None
    """Bytes of its record; None if it has none."""
    record_blocks: bytes = b""
    """The digests of the blocks of that."""
    seconds: float = 0.0
    """Seconds that the rank took to write it, with its digests."""
    objects: Sequence[PlacedObject] = ()
    digests: Mapping[str, TensorDigest] = {}  # never changed
    """By key, the part of each tensor's digest that comes from this file."""
    nan_in: Sequence[str] = ()
    """Keys of weights and optimizer states in which NaN was seen."""


class SaveOfRanks:
    """The save of `target`: the file of each rank, and on the coordinator the commit. One instance a save.

    It is a two-phase commit: all ranks write (`write` is the preparation), the coordinator gathers what they wrote (the
    vote), and `finish` commits there, after every rank succeeded, and nowhere else.
    """

    def __init__(self, target: SaveTarget, content: RankContent | None) -> None:
        self._target, self._content = target, content
        self.committed: CheckpointInfo | None = None
        """What was committed: on the coordinator, after `finish`; else None."""

    def begin(self) -> str:
        """Make the place of the save; return its name. **Coordinator only**, before any rank writes there."""
        self._target.found.place = place = self._target.store.begin(self._target.step)
        return place

    def finish(self, place: str, results: Sequence[Sequence[Any] | None]) -> None:
        """Write metadata and manifest, and commit. **Coordinator only**.

        `results` has for each rank a `WrittenFile`, as a tuple, or None.
        """
        assert self._content is not None
        target, description = self._target, self._content.plan.description
        assert description is not None, "the coordinator describes"
        by_rank = received(results)
        objects = [placed for file in by_rank.values() for placed in file.objects]
        not_finite = {key for file in by_rank.values() for key in file.nan_in}
        never_finite = self._never_finite(not_finite)
        nan_in = sorted(not_finite.difference(never_finite))
        files = written_files(by_rank, len(results))
        target.store.check_lease()  # The start of another job, which has the folder by now, removes what is staged.
        faults.point("metadata", step=target.step)
        if by_rank:
            rank = max(by_rank, key=lambda rank: by_rank[rank].seconds)
            target.found.slowest = rank, by_rank[rank].seconds
        has_metadata = description.has_metadata(target.origin.dcp_metadata)
        table = table_of_objects(objects, with_places=not has_metadata)
        if has_metadata:
            data, record = description.metadata(objects)
            target.store.add_metadata(place, data)
            files |= {layout.METADATA: record}
        digests = _tensor_digests([file.digests for file in by_rank.values()], description)
        manifest = Manifest(
            step=target.step,
            kind=target.kind,
            created_at=time.time(),
            world_size=len(results),
            versions=versions(),
            files=files,
            lineage=self._lineage(),
            tensors=description.tensors,
            objects=table,
            structure=description.structure,
            extra=_extra(target, digests, nan_in, never_finite, has_metadata=has_metadata),
        )
        self.committed = target.store.commit(target.step, manifest, place=place)
        _warn_of_nan(target.step, nan_in)

    def write(self, place: str) -> tuple[Any, ...] | None:
        """Write this rank's file; return its `WrittenFile`, as a tuple, None if it has none. Any thread."""
        content, target = self._content, self._target
        assert content is not None, "else its failure was raised before"
        if content.num_bytes == 0:
            return None
        plan, began = content.plan, time.perf_counter()
        name, new = f"{target.store.address}/{place}/{plan.file_name}", target.store.new_file(place, plan.file_name)
        with if_overdue(SLOW_SECONDS, lambda: _warn_of_slow(name)):
            record = content.write(new)
        # From the copy and in the saver's thread, where there is one: no step waits for it.
        digests = _written_shares(plan, content.tensors()) if target.origin.tensor_digests else {}
        objects, own, of_rank = content.objects, plan.own, None
        if own is not None:
            text = own.record(record, objects).to_json()
            of_rank = target.store.new_file(place, own.file_name).write(in_memory(text))
            record, objects = FileRecord(record.size), own.without(objects)
        prefix = "model." if target.kind is CheckpointKind.FULL else ""
        nan_in = names_with_nan([part.key for part in plan.parts], content.tensors(), prefix)
        seconds = time.perf_counter() - began
        record_size, record_blocks = (None, b"") if of_rank is None else (of_rank.size, of_rank.blocks)
        return tuple(
            WrittenFile(record.size, record.blocks, record_size, record_blocks, seconds, objects, digests, nan_in)
        )

    def _never_finite(self, found: Collection[str]) -> list[str]:
        """Return which of the states `found`, which are not finite now, were so at the run's first save: by design.

        At that save itself, with one warning, all of them if the weights are finite.
        """
        target = self._target
        if not any(key.startswith(OPTIMIZER) for key in found):
            return []
        last = next((info for info in reversed(target.store.committed()) if info.kind is CheckpointKind.FULL), None)
        before = last.never_finite if last is not None and last.step > 0 else target.origin.never_finite
        if before is not None:
            return sorted({*found} & {*before})
        if not all(key.startswith(OPTIMIZER) for key in found):
            return []
        logger.warning(
            "Step %d, the first that this run saves, has NaN or infinity in optimizer states (%s), while its weights "
            "are finite. They are taken for initial values of the optimizer, not for damage",
            target.step,
            listed(sorted(found), most=3),
        )
        return sorted(found)

    def _lineage(self) -> Lineage:
        lineage = self._target.origin.lineage
        if lineage.last_kept is None:
            return lineage
        abandons = abandoned_by(lineage.run_id, lineage.last_kept, self._target.store.listed())
        return dataclasses.replace(lineage, abandons=abandons)


def commit(
    content: RankContent | None, failure: Exception | None, target: SaveTarget, peers: Peers, exchange: Exchange
) -> CheckpointInfo | None:
    """Write `content` and commit `target`; return what was committed on the coordinator, else None.

    **Collective** over `exchange`, any thread. `failure` is what failed on this rank before, if anything did. Raises
    `SaveFailed` or `LeaseLost` on every rank if one rank failed, and KeyboardInterrupt in the main thread.
    """
    save = SaveOfRanks(target, content)
    try:
        place = exchange.decide(lambda: _raise_if(failure), lambda _: save.begin())
        exchange.decide(lambda: save.write(place), lambda results: save.finish(place, results))
    except RanksFailed as error:
        for cause in error.failures.values():
            # Ctrl-C is no failure of the save. Only the main thread receives it; the ranks agreed that one had it.
            is_main = threading.current_thread() is threading.main_thread()
            if isinstance(cause, LeaseLost) or (isinstance(cause, KeyboardInterrupt) and is_main):
                raise cause from error
        raise SaveFailed(target.step, str(error)) from error
    except Exception as error:
        peers.is_group_in_doubt = True
        exchange.leave(error)  # Ranks may wait for this one, and not for the one that is lost.
        raise SaveFailed(target.step, f"{type(error).__name__}: {error}") from error
    return save.committed


def _warn_of_slow(file: str) -> None:
    logger.warning("Writing %s takes more than %g s: its file system is slow, or does not answer", file, SLOW_SECONDS)


def _raise_if(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def received(results: Sequence[Sequence[Any] | None]) -> dict[int, WrittenFile]:
    """Return what the ranks that wrote a file sent, by rank."""
    return {rank: WrittenFile(*file) for rank, file in enumerate(results) if file is not None}


def written_files(by_rank: Mapping[int, WrittenFile], world_size: int) -> Files:
    """Return the files that the ranks wrote: in columns if the ranks have records; all have one, or none has."""
    if all(file.record_size is None for file in by_rank.values()):
        return {layout.data_file(rank, 0): FileRecord(file.size, file.blocks) for rank, file in by_rank.items()}
    sizes: list[int | None] = [None] * world_size
    record_sizes = [*sizes]
    for rank, file in by_rank.items():
        sizes[rank], record_sizes[rank] = file.size, file.record_size
    return with_rank_files(
        {}, FilesOfRanks(sizes, record_sizes, b"".join(file.record_blocks for file in by_rank.values()))
    )


def versions() -> dict[str, str]:
    """Return the versions that a manifest records."""
    return {
        "torchtitan_lite": torchtitan_lite.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _extra(
    target: SaveTarget,
    tensor_digests: Mapping[str, str],
    nan_in: Sequence[str],
    never_finite: Sequence[str],
    *,
    has_metadata: bool,
) -> dict[str, Any]:
    """Return what a manifest records besides files and tensors; of what is optional only what there is."""
    origin = target.origin
    optional = {
        DCP_METADATA: "" if has_metadata else LEFT_OUT,
        # With either the checkpoint counts as no good one.
        NAN_IN: list(nan_in),
        NEVER_FINITE: never_finite,
        RANKS_DIFFER: list(target.ranks_differ),
        METRICS: dict(origin.metrics),
        START: origin.start,
    }
    # Only a start that keeps images records these: later ones compare images with them.
    of_start = {TRAINED_SECONDS: origin.trained_seconds} if origin.start else {}
    of_memory = {RESUMED_FROM_MEMORY: origin.memory_step} if origin.memory_step >= 0 else {}
    recorded = {TOPOLOGY: origin.topology, CONFIG: origin.config, TENSOR_DIGESTS: tensor_digests}
    return recorded | {name: value for name, value in optional.items() if value} | of_start | of_memory


def _warn_of_nan(step: int, nan_in: Sequence[str]) -> None:
    """Warn, where there is some: a refused save would end runs that a person would rather inspect."""
    if nan_in:
        logger.warning(
            "Step %d is saved with %s (%s). Retention keeps the latest checkpoint without it",
            step,
            "NaN or infinity in its optimizer states" if nan_in[0].startswith(OPTIMIZER) else "NaN in its weights",
            ", ".join(nan_in[:3]) + (f" and {len(nan_in) - 3} more" if len(nan_in) > 3 else ""),
        )


def _tensor_digests(shares: Sequence[Mapping[str, TensorDigest]], description: Description) -> dict[str, str]:
    """Return each tensor's digest by key, summed over its chunks."""
    total: dict[str, TensorDigest] = {}
    for share in shares:
        for key, digest in share.items():
            total[key] = total.get(key, TensorDigest()) + digest
    found: dict[str, str] = {}
    for key, digest in total.items():
        entry = description.tensors[key]
        found[key] = finish(digest, DTYPES[entry["dtype"]], entry["shape"]).to_hex()
    return found


def _written_shares(plan: RankPlan, written: Sequence[torch.Tensor]) -> dict[str, TensorDigest]:
    shares: dict[str, TensorDigest] = {}
    for part, tensor in zip(plan.parts, written, strict=True):
        if plan.own is None or part.key not in plan.own.tensors:
            digest = digest_chunk(tensor.detach().cpu(), global_shape=part.shape, offsets=part.offsets)
            shares[part.key] = shares.get(part.key, TensorDigest()) + digest
    return shares


# Finds NaN in the weights and the optimizer states of a checkpoint from a sample of each.
#
# A loss that became NaN is in nearly all of them after one step, so a small part of each tensor shows it, for a
# hundredth of the work of a check of every element. The sample is all of a tensor of up to `_MAX_ELEMENTS`, both ends
# of a larger one, and of more than `_MAX_TENSORS` tensors an even choice. In weights infinity is no finding: attention
# masks are made of it. In an optimizer's tensors it is one, because no later step ends it; but not in its single
# numbers, such as a lowest loss that begins at infinity.


OPTIMIZER = "optimizer."
"""With this the keys of optimizer states begin."""

_MAX_ELEMENTS = 4096
_MAX_TENSORS = 1024


@torch.no_grad()
def names_with_nan(keys: Sequence[str], tensors: Sequence[torch.Tensor], prefix: str) -> list[str]:
    """Return the keys of those `tensors` whose sample holds what it must not, of their `keys`. Any rank.

    These are the weights, whose keys begin with `prefix`, and the optimizer states.
    """
    dtypes = [tensor.dtype for tensor in tensors]
    # Two floats of 4 bits in a byte have no NaN.
    sampled = {each for each in {*dtypes} if each.is_complex or (each.is_floating_point and "float4" not in f"{each}")}
    # Numbers, not pairs: of thousands of new pairs the garbage collector would take more time than all else here.
    chosen = [number for number, dtype in enumerate(dtypes) if dtype in sampled]
    weights = [number for number in chosen if keys[number].startswith(prefix)]
    others = [number for number in chosen if not keys[number].startswith(prefix)]
    moments = [number for number in others if keys[number].startswith(OPTIMIZER) and tensors[number].dim()]
    of_moments = _keys_of_wrong_tensors(keys, tensors, moments, _is_not_finite, _MAX_TENSORS)
    if of_moments:  # By design, maybe: then all of them are to be known.
        of_moments = _keys_of_wrong_tensors(keys, tensors, moments, _is_not_finite, len(moments))
    return [*_keys_of_wrong_tensors(keys, tensors, weights, torch.isnan, _MAX_TENSORS), *of_moments]


def _keys_of_wrong_tensors(
    keys: Sequence[str],
    tensors: Sequence[torch.Tensor],
    numbers: Sequence[int],
    is_wrong: Callable[[torch.Tensor], torch.Tensor],
    most: int,
) -> dict[str, None]:
    samples: dict[tuple[torch.dtype, torch.device], list[tuple[str, torch.Tensor]]] = {}
    for number in numbers[:: -(-len(numbers) // most) or 1]:
        for part in _sampled_parts(tensors[number].detach()):
            part = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
            samples.setdefault((part.dtype, part.device), []).append((keys[number], part))
    found: dict[str, None] = {}
    for (dtype, _), of_a_kind in samples.items():
        if dtype.itemsize == 1:
            of_a_kind = [(name, wide_float(part)) for name, part in of_a_kind]
        # A norm is wrong if one element is, and one call computes that of all; which they are matters only then.
        if is_wrong(get_total_norm([part for _, part in of_a_kind])):
            found |= dict.fromkeys(name for name, part in of_a_kind if is_wrong(part).any())
    return found


def _is_not_finite(tensor: torch.Tensor) -> torch.Tensor:
    return ~tensor.isfinite()


def _sampled_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all of `tensor`, or both ends of a large one."""
    if tensor.numel() <= _MAX_ELEMENTS:
        return [tensor] if tensor.numel() else []
    first = last = tensor
    while first.numel() > _MAX_ELEMENTS and first.dim() > 1:
        first, last = first[0], last[-1]
    return [first[:_MAX_ELEMENTS], last[-_MAX_ELEMENTS:]]
