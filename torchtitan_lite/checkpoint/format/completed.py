"""Tables of a manifest joined with those that the records of ranks add to it."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_lite.checkpoint.format.structure import decode_structure, encode_structure, merged_structure
from torchtitan_lite.store.manifest import Table


def joined_tables(tables: Sequence[Table]) -> Table:
    """Return the entries of all `tables`, which have different keys, without parsing one."""
    having = [each for each in tables if each]
    if len(having) < 2:
        return having[0] if having else Table()
    return Table.of_text(b"{" + b",".join(each.text.strip()[1:-1] for each in having) + b"}", "")


def joined_structures(tables: Sequence[Table]) -> Table:
    """Return the containers of all `tables` in one. Raises ValueError where they do not fit together."""
    having = [each for each in tables if each]
    if len(having) < 2:
        return having[0] if having else Table()
    return Table({"root": encode_structure(merged_structure(decode_structure(each["root"]) for each in having)[0])})
