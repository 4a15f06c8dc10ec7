"""The two sources of settings: a TOML file and the command line.

Both are read into the same `Setting`s, in the order in which they were written, under the names of `JobConfig`
whatever the spelling. So of two settings of a key the last one wins, and later code need not know their source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config.aliases import VALUE_ALIASES
from torchtitan_lite.config.keys import (
    KNOWN_SECTIONS,
    Meaning,
    meaning_of,
    unknown_key,
    unknown_section,
)
from torchtitan_lite.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_FOLDERS = (Path("train_configs"), Path(__file__).resolve().parents[1] / "train_configs")


@dataclass(frozen=True)
class Setting:
    """`key` has the value `text`; `where` names the place for an error, such as "some.toml: training.steps"."""

    key: str
    text: str
    where: str


def find_config_file(name: str) -> Path:
    """Return the file `name`: as given, else in ./train_configs/, else in the package's train_configs/."""
    for path in (Path(name), *(folder / name for folder in CONFIG_FOLDERS)):
        if path.is_file():
            return path
    known = sorted({path.name for folder in CONFIG_FOLDERS for path in folder.glob("*.toml")})
    found = f"neither {name} nor train_configs/{name} was found" if name else "expected a file, found an empty value"
    raise ConfigError(
        f"--job.config_file: {found}. Name a file, or one of these: {', '.join(known) or '(train_configs/ is empty)'}."
    )


def named_model(argv: Sequence[str]) -> Setting | None:
    """Return the model that a command line, or its TOML file, names. Looks at no other names and values."""
    last = {flag[2:].replace("-", "_"): words[0] for flag, words in _command_line_options(argv) if words}
    if "model.name" in last:
        return Setting("model.name", last["model.name"], "--model.name")
    if "job.config_file" not in last:
        return None
    path = find_config_file(last["job.config_file"])
    model = _toml_document(path).get("model")
    name = model.get("name") if isinstance(model, dict) else None
    return Setting("model.name", name, f"{path}: model.name") if isinstance(name, str) else None


def read_toml(path: Path) -> list[Setting]:
    """Return the settings of a TOML file. Raise ConfigError for unknown names and for values of the wrong type."""
    document = _toml_document(path)
    for section, content in document.items():
        if not isinstance(content, dict):
            raise ConfigError(f"{path}: {section} is outside any section. Put it under a [section] line.")
        if section.replace("-", "_") not in KNOWN_SECTIONS:
            raise unknown_section(section, str(path))
    return [_toml_setting(name.replace("-", "_"), value, f"{path}: {name}") for name, value in _flat(document)]


def read_command_line(argv: Sequence[str]) -> list[Setting]:
    """Return the settings of a command line: --name value, --name=value, and for switches --name or --no_name."""
    settings = []
    for flag, words in _command_line_options(argv):
        name = flag[2:].replace("-", "_")
        settings.append(_command_line_setting(name, words, f"--{name}"))
    return settings


def _toml_document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a text file: {error}.") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}.") from None


def _toml_setting(name: str, value: object, where: str) -> Setting:
    meaning = meaning_of(name)
    if meaning is None:
        raise unknown_key(name, where)
    return _setting(meaning, meaning.kind.text_of(value, where), where)


def _command_line_setting(name: str, words: list[str], where: str) -> Setting:
    meaning = meaning_of(name)
    if meaning is not None:
        return _setting(meaning, meaning.kind.text_of_words(words, where), where)
    switch = meaning_of(name.replace(".no_", ".", 1))
    if ".no_" not in name or switch is None or switch.kind.base is not bool:
        raise unknown_key(name, where)
    if words:
        raise ConfigError(f"{where}: takes no value, found {' '.join(words)!r}.")
    return _setting(switch, "false", where)


def _setting(meaning: Meaning, text: str, where: str) -> Setting:
    text = meaning.kind.checked(text, meaning.key, where) if meaning.values else text
    text = meaning.values.get(text, text)
    return Setting(meaning.key, VALUE_ALIASES.get(meaning.key, {}).get(text.lower(), text), where)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _command_line_options(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each --name with the words up to the next one; `=` ends a name."""
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            options.append((flag, [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(f"{word!r} comes before any key. Write --section.key value.")
    return options
