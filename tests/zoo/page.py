"""The page docs/what_resumes.md: the outcome of each case, in a table for each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.zoo.apart import APART, LATE
from tests.zoo.outcome import EQUAL, Outcome
from tests.zoo.tricks import TRICKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what_resumes.md"

HEADINGS = {
    "optimizer": ("Optimizers", "Every class of `torch.optim`, some with several settings."),
    "scheduler": ("LR schedulers", "Every class of `torch.optim.lr_scheduler`, and `SWALR`."),
    "model": ("Models", "Models with more than plain layers."),
    "wrapper": ("Wrappers", "Wrappers of the model, and the wrappers under which its checkpoint was loaded then."),
    "extra": ("Besides", "Other states of a run."),
    "mode": ("Modes", "The values of `checkpoint.async_mode`."),
}

HEAD = """\
# What resumes

Look up whether your optimizer, schedule, model or wrapper resumes exactly.
Every cell was tested with torch {version} on CPUs; `python -m tests.zoo` tests them again and writes this page.

- **equal**: eight uninterrupted steps had the same result, bit for bit, as three steps, a checkpoint, and five steps in
  new processes.
  The result is the losses, LR, parameters, buffers, optimizer states, other states and generators.
  In columns with *then*, the new processes had the model in another form: the loaded state was the saved one, bit for
  bit, and the losses of the next five steps were equal within 1e-3.
- **refused**: the error below the table names the cause and the fix.
  The constructor raises it, or the first save; or the load, if the checkpoint does not fit the new processes.
- **warned**: the first save logs the warning below the table: it names what a resumed run lacks.
- **not offered by torch**: torch raises the error below the table when it trains this, even without a checkpoint.

Unless a table says otherwise, the model is a few plain layers, trained by AdamW with LambdaLR in one process.
"""


BETWEEN = """\
## Between ranks

What people do with two and with four ranks (HSDP: four), saved at step 3 in each mode, resumed from disk or from an
image in memory, saved again at step 6, and resumed by a third start.
Two processes or four train on other data each.
**warned** is one warning that names what differs, or what the resumed run will lack.
With `ranks_may_differ=True`, equal means that every rank has rank 0's state.
DDP sums the first step of each process in an order of its own, which four ranks see in the last bits; here a step
without an optimizer comes before the load.
"""

HELD_APART = """\
## What ranks hold apart

The same for states that only some ranks have, or have otherwise.
The late differences are at each of the 200 positions in one of the cells.
"""


LOADERS = """\
## Loaders without a state

Loops over a plain `DataLoader`, which skip after a load what their epoch of eight steps has had.
A generator is seeded with the number of each epoch, before its iterator is made.
An iterator that is made before `load()` is the first one; at the end of an epoch, the next one is made after it.
"""


def render(
    cells: Mapping[str, Mapping[str, Mapping[str, Outcome]]],
    pairs: Sequence[Outcome],
    between: Mapping[str, Mapping[str, Outcome]],
    loops: Mapping[str, Mapping[str, Outcome]],
) -> str:
    """Return the page; `cells` are by kind, entry and column, those `between` ranks by trick, the `loops` by name."""
    lines = [HEAD.format(version=torch.__version__.partition("+")[0])]
    for kind, rows in cells.items():
        title, about = HEADINGS[kind]
        lines += [f"## {title}", "", about, "", *_table(kind, rows), ""]
    lines += [LOADERS, *_table("loader", loops), ""]
    shortened = {name: _shortened(row) for name, row in between.items()}
    for about, names in ((BETWEEN, TRICKS), (HELD_APART, LATE | APART)):
        lines += [about, *_table("ranks", {name: shortened[name] for name in names}), ""]
    lines += ["## Pairs", "", _of_pairs(pairs), ""]
    return "\n".join(lines)


def _table(kind: str, rows: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    if kind == "wrapper":
        header = ["wrapper", "as it was", "then"]
        body = [[name, str(row["as it was"]), _then(row)] for name, row in rows.items()]
    else:
        header = [kind, *next(iter(rows.values()))]
        body = [[name, *map(str, row.values())] for name, row in rows.items()]
    notes: dict[str, int] = {}
    lines = [header, ["---"] * len(header), *([_cell(each, notes) for each in row] for row in body)]
    table = [f"| {' | '.join(line)} |" for line in lines]
    return table if not notes else [*table, "", *(f"{number}. {why}" for why, number in notes.items())]


def _shortened(row: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Return `row` with sentences that do not list what differs: each row would have its own."""
    listed = r"(under one name|different values of):? \S+ \((?:rank|\[).*?(, equal at step \d+)?\.*$"
    return {column: Outcome(outcome.kind, re.sub(listed, r"\1 ...\2", outcome.why)) for column, outcome in row.items()}


def _cell(text: str, notes: dict[str, int]) -> str:
    """Return `text`, or its kind with the number of its sentence below the table."""
    kind, colon, why = text.partition(": ")
    if not colon:
        return text
    escaped = why.replace("<", "\\<").replace("|", "\\|")
    return f"{kind} ({notes.setdefault(escaped, len(notes) + 1)})"


def _then(row: Mapping[str, Outcome]) -> str:
    kinds = {name.removeprefix("then "): outcome for name, outcome in row.items() if name != "as it was"}
    if all(outcome.kind == EQUAL for outcome in kinds.values()):
        return f"equal under {' and under '.join(kinds)}"
    return "; ".join(str(outcome) for outcome in kinds.values() if outcome.kind != EQUAL)


def _of_pairs(pairs: Sequence[Outcome]) -> str:
    counts = Counter(outcome.kind for outcome in pairs)
    found = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    return (
        "Any two entries of two of these tables (one optimizer of each class; FSDP1 only with a mesh; no model that is "
        f"refused or warned of) were also tested together, if torch allows it, in one of {len(pairs)} cases: {found}."
    )
