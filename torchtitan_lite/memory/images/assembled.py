"""Put a manifest together from the cards of all images of one step.

The cards were written by processes that are gone, perhaps by ones that someone else started: what does not fit together
is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_lite.checkpoint.reading.folder import joined_structures, joined_tables
from torchtitan_lite.collection import no_collection
from torchtitan_lite.memory.images.card import Card
from torchtitan_lite.store import layout
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, Table
from torchtitan_lite.store.manifest_fields import TRAINED_SECONDS


def assembled_manifest(cards: Sequence[Card]) -> Manifest:
    """Return the manifest of the checkpoint whose images the `cards` describe. Raise ValueError if they do not fit.

    It has no `.metadata` among its files, and no digests of tensors.
    """
    by_rank = sorted(cards, key=lambda card: card.rank)
    if not by_rank:
        raise ValueError("there are no cards")
    first = by_rank[0]
    if [card.rank for card in by_rank] != [*range(first.world_size)]:
        found = ", ".join(str(card.rank) for card in by_rank)
        raise ValueError(f"expected the cards of ranks 0 to {first.world_size - 1}, found those of {found:.200}")
    for card in by_rank:
        _check_same_step(card, first)
    if first.tables.tensors is None or not first.tables.structure:
        raise ValueError("the card of rank 0 has no tables of tensors and containers")
    having = [card.tables for card in by_rank]
    return Manifest(
        step=first.key.step,
        kind=CheckpointKind.FULL,
        created_at=first.created_at,
        world_size=first.world_size,
        versions=dict(first.run.versions),
        files={card.file: card.record for card in by_rank if card.file},
        lineage=first.run.lineage,
        tensors=joined_tables([tables.tensors for tables in having if tables.tensors is not None]),
        objects=_objects_of_ranks(by_rank),
        structure=joined_structures([tables.structure for tables in having if tables.structure is not None]),
        extra={
            "topology": first.run.topology,
            "config": dict(first.run.config),
            "start": first.key.start,
            TRAINED_SECONDS: first.run.trained_seconds,
        },
    )


def same_contents(on_disk: Manifest, in_memory: Manifest) -> bool:
    """Return whether both, completed, describe the same checkpoint, byte by byte."""
    files = {name: record for name, record in on_disk.files.items() if layout.is_data_file(name)}
    # Only on disk a value may come with its item, for a `.metadata` that is added later.
    objects = {key: {"value": entry["value"]} if "value" in entry else entry for key, entry in on_disk.objects.items()}
    is_same = files == in_memory.files and objects == dict(in_memory.objects)
    return is_same and dict(on_disk.tensors) == dict(in_memory.tensors)


def _objects_of_ranks(by_rank: Sequence[Card]) -> Table:
    """Return the objects of all cards in one table. Raise ValueError if two ranks have the same one.

    There may be a million. Their text is put together as it is, and parsed only to find those that are there twice.
    """
    having = [card for card in by_rank if card.tables.objects]
    if len(having) < 2:
        return having[0].tables.objects if having else Table()
    keys: set[str] = set()
    for card in having:
        with no_collection():
            own = set(card.tables.objects)
        if not keys.isdisjoint(own):
            raise ValueError(f"rank {card.rank}: {min(keys & own)!r:.100} is an object of another rank, too")
        keys |= own
    inside = (card.tables.objects.text.strip()[1:-1] for card in having)
    return Table.of_text(b"{" + b",".join(inside) + b"}", "card")


def _check_same_step(card: Card, first: Card) -> None:
    """Raise ValueError unless `card` is of the same step of the same start as `first`, the card of rank 0."""
    run, of_first = card.run, first.run
    for name, found, expected in (
        *zip(card.key._fields, card.key, first.key, strict=True),
        ("world_size", card.world_size, first.world_size),
        ("folder_id", run.folder_id, of_first.folder_id),
        ("topology", run.topology, of_first.topology),
    ):
        if found != expected:
            raise ValueError(f"rank {card.rank}: {name}: expected {expected!r:.80}, found {found!r:.80}")
    lineage, of_first_rank = run.lineage, of_first.lineage
    if (lineage.run_id, lineage.branch_point) != (of_first_rank.run_id, of_first_rank.branch_point):
        raise ValueError(f"rank {card.rank}: it is of run {lineage.run_id}, rank 0 of {of_first_rank.run_id}")
    if card.file and layout.rank_of(card.file) != card.rank:
        raise ValueError(f"rank {card.rank}: {card.file!r:.80} is not the name of its file")
    if not card.file and card.record.size:
        raise ValueError(f"rank {card.rank}: its file of {card.record.size} bytes has no name")
