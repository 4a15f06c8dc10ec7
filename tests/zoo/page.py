"""The page docs/what_resumes.md: the outcome of each case, in a table for each kind."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.zoo.apart import APART, LATE
from tests.zoo.library_record import Package, read
from tests.zoo.outcome import EQUAL, NOT_OFFERED_THERE, NOT_RUN, Outcome
from tests.zoo.tricks import TRICKS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "what_resumes.md"

LISTED = r"(under one name|different values of):? \S+ \((?:rank|\[).*?(, equal at step \d+)?\.*$"
"""A list of what differs, in a sentence."""

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


OTHER_LIBRARIES = """\
## Optimizers of other libraries

Every optimizer that a package had when `python -m tests.zoo.libraries` ran it under torch {torch}, on CPUs: built with
its defaults (under FSDP2 with `foreach=False`), or as its documentation says, on a few layers.
Eight steps were repeated from step 3 and from step 6 by new processes each, from disk and from an image in memory;
where these two differ, the cell has both.
**warned** and **refused** have their sentence below the table; before the first save, an image that cannot be made is
a warning.
**not offered**: the library does not train this here, even without a checkpoint; its error is in the record,
`tests/zoo/libraries.json`.
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
    return with_libraries("\n".join(lines), read())


def with_libraries(page: str, packages: Mapping[str, Package]) -> str:
    """Return `page` with this record of other libraries as its last section."""
    heading = OTHER_LIBRARIES.partition("\n")[0]
    return f"{page.partition(heading)[0].rstrip()}\n\n{of_libraries(packages)}"


def of_libraries(packages: Mapping[str, Package]) -> str:
    """Return the section about other libraries, with a row for all classes of a package that have equal outcomes."""
    notes: dict[str, int] = {}
    lines = [["package", "optimizers", "1 process", "FSDP2 on 2 ranks"], ["---"] * 4]
    for name, package in packages.items():
        title = f"{name} {package.version}, {package.date}".replace(" ,", ",")
        if package.not_run:
            lines.append([title, _cell(f"{NOT_RUN}: {package.not_run}", notes), "", ""])
        rows: dict[tuple[str, ...], list[str]] = {}
        for kind, row in package.outcomes.items():
            rows.setdefault(tuple(str(_without_names(each)) for each in row.values()), []).append(kind)
        for at, (row, kinds) in enumerate(sorted(rows.items(), key=lambda each: [text != EQUAL for text in each[0]])):
            lines.append([title if at == 0 else "", ", ".join(kinds), *_of_row(row, notes)])
    table = [f"| {' | '.join(line)} |" for line in lines]
    torches = " and ".join(sorted({package.torch for package in packages.values()}))
    found = [OTHER_LIBRARIES.format(torch=torches), *table, "", *(f"{number}. {why}" for why, number in notes.items())]
    return "\n".join(found).rstrip() + "\n"


def _of_row(texts: Sequence[str], notes: dict[str, int]) -> list[str]:
    """Return a cell for each number of processes; the texts of the columns from disk and from memory alternate."""
    cells = []
    for disk, memory in zip(texts[::2], texts[1::2], strict=True):
        both = [_cell(text, notes) for text in dict.fromkeys((disk, memory))]
        cells.append(", from memory ".join(both))
    return cells


def _without_names(outcome: Outcome) -> Outcome:
    """Return `outcome` without steps and names of single states, for equal sentences, and without errors of others."""
    if outcome.kind == NOT_OFFERED_THERE:
        return Outcome(outcome.kind)
    where = r"^(?:No save could succeed at this step: |Step \d+ has no in-memory snapshot of rank \d+: )?"
    why = re.sub(where + r"(?:the save of step \d+ failed: rank \d+: (?:TypeError: )?)?", "", outcome.why)
    why = re.sub(r" \(WeightsUnpickler error.*\)", "", re.sub(r"(optimizer\.\w+)\.[^ ,]+", r"\1...", why))
    return Outcome(outcome.kind, re.sub(LISTED, r"\1 ...\2", why))


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
    return {column: Outcome(outcome.kind, re.sub(LISTED, r"\1 ...\2", outcome.why)) for column, outcome in row.items()}


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
