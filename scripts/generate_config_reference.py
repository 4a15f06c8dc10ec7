"""Write docs/config.md, the config reference, from the definitions that the program itself reads.

Sections, keys, kinds and defaults come from the dataclasses, the descriptions from the doc strings under the fields,
the other names from the tables of aliases and of unsupported keys. A test compares the result with docs/config.md.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

from torchtitan_lite.config.argument_parser import doc_strings
from torchtitan_lite.config.keys import ALIASES, FORMER_SWITCHES, KEYS, SECTIONS
from torchtitan_lite.config.unsupported import UNSUPPORTED, Unsupported
from torchtitan_lite.config.value_kinds import ValueKind

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
_INTRODUCTION = """\
# Config reference

Look up every key of a run's configuration, in a TOML file or on the command line.
Keys that torchtitan has keep its names and, with few exceptions, its defaults of November 2024.
`scripts/generate_config_reference.py` writes this page from `torchtitan_lite/config/sections/`.

## How a value is found

The command line wins over the TOML file, and the file over the default.
Of several spellings of one key, the last one given wins.
`--job.config_file` names the file: as given, or in `train_configs/`.
On the command line a key is `--section.key value` or `--section.key=value`, with underscores or hyphens.
A switch is `--section.key` or `--section.no_key`.
A list is separated by commas or spaces; in TOML it is a list of strings, or of whole numbers where that is its kind.
A TOML value must be of the key's own kind: `"5"` is not a whole number.
An unknown key or a value that does not fit is an error: one message, and exit code 2.
`train_configs/llama_debug.toml` has every key.
"""
_UNSUPPORTED_INTRODUCTION = """\
## Unsupported keys

So that a torchtitan TOML, or a copy of an older `llama_debug.toml`, loads, these keys are accepted while off.
One log line names them.
A key that turns its feature on is an error.
Keys of `[parallelism]` are also accepted in `[training]` and `[experimental]`.
"""
_KINDS = {bool: "switch", int: "whole number", float: "number", str: "string", tuple: "list"}


def render_reference() -> str:
    """Return the whole page, as Markdown."""
    pages = [_INTRODUCTION, *(_section_text(name, cls) for name, cls in SECTIONS.items()), _unsupported_text()]
    return "\n".join(pages)


def _section_text(section: str, cls: type) -> str:
    docs = doc_strings(cls)
    rows = [_row(f"{section}.{field.name}", field.default, docs[field.name]) for field in dataclasses.fields(cls)]
    return f"## [{section}]\n\n{inspect.getdoc(cls)}\n\n{_table_head('key', 'kind', 'default', 'meaning')}" + "".join(
        rows
    )


def _row(key: str, default: object, doc: str) -> str:
    others = ", ".join(f"`{other}`" for other in _other_names(key))
    meaning = doc + (f" Also: {others}." if others else "")
    return _markdown_row(f"`{key.partition('.')[2]}`", _value_kind_text(KEYS[key]), _default(default), meaning)


def _other_names(key: str) -> Iterator[str]:
    for name, meant in ALIASES.items():
        if meant == key:
            values = "; ".join(f"{given} = {becomes}" for given, becomes in FORMER_SWITCHES.get(name, {}).items())
            yield f"{name} ({values})" if values else name


def _value_kind_text(kind: ValueKind) -> str:
    named = "list of whole numbers" if kind.element is int else _KINDS[kind.base]
    named = f"{named}, or `{kind.word}`" if kind.word else named
    words = ", ".join(f"`{choice}`" for choice in kind.choices) or named
    return f"{words}, or unset" if kind.optional else words


def _default(value: object) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return (
            "`[" + ", ".join(f'"{element}"' if isinstance(element, str) else str(element) for element in value) + "]`"
        )
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _unsupported_text() -> str:
    features: dict[str, list[str]] = {}
    for name, unsupported in UNSUPPORTED.items():
        features.setdefault(unsupported.feature, []).append(_accepted(name, unsupported))
    rows = [_markdown_row(feature, ", ".join(names)) for feature, names in features.items()]
    return (
        f"{_UNSUPPORTED_INTRODUCTION}\n{_table_head('feature', 'keys, with the value that leaves it off')}"
        + "".join(rows)
    )


def _accepted(name: str, unsupported: Unsupported) -> str:
    values = " or ".join(text or "empty" for text in unsupported.accepted if text != "None")
    return f"`{name}` ({values})" if values else f"`{name}`"


def _table_head(*heads: str) -> str:
    return _markdown_row(*heads) + _markdown_row(*("---" for _ in heads))


def _markdown_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(render_reference(), encoding="utf-8")
