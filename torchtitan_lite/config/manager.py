"""From a command line to a `JobConfig`: command line > TOML > default.

The keys of a TOML file and those of the command line follow the same rules. Of a setting that is overridden only the
name and the kind are checked, not the value: a torchtitan TOML loads once the command line replaces its dataset and
tokenizer.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_lite.config.argument_parser import Parser
from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.keys import (
    KEYS,
    KNOWN_SECTIONS,
    SECTIONS,
    VALUE_ALIASES,
    Meaning,
    meaning_of,
    unknown_key,
    unknown_section,
)
from torchtitan_lite.config.unsupported import UNSUPPORTED
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.log import forget_stdout, logger

_DESCRIPTION = "Train a Llama. Command line > TOML file (--job.config_file) > default."


def parse_config(argv: Sequence[str]) -> JobConfig:
    """Return the configuration of `argv` and its --job.config_file. Raise ConfigError for wrong usage.

    `--help` prints every key and exits with 0.
    """
    if "--help" in argv or "-h" in argv:
        _print_help()
        raise SystemExit(0)
    check_family(named_model(argv))  # A TOML of another family has other keys, too.
    given = read_command_line(argv)
    file = {setting.key: setting.text for setting in given}.get("job.config_file")
    in_file = read_toml(find_config_file(file)) if file is not None else []
    last = {setting.key: setting for setting in (*in_file, *given)}
    config = _config_of(_without_unsupported(with_datasets(last).values()))
    section = config.checkpoint
    exports = section.model_weights_only or section.export_folder or section.last_save_in_hf
    if section.export_dtype != "float32" and not exports:
        logger.warning(
            "checkpoint.export_dtype has no effect without checkpoint.model_weights_only, export_folder or "
            "last_save_in_hf"
        )
    return config


def parse_config_or_exit(argv: Sequence[str]) -> JobConfig:
    """Return as `parse_config` does; for wrong usage print one message on stderr and exit with 2.

    Exit with 1, silently, if the reader of --help has seen enough.
    """
    try:
        return parse_config(argv)
    except BrokenPipeError:
        forget_stdout()
        raise SystemExit(1) from None
    except ConfigError as error:
        sys.stderr.write(f"ConfigError: {error}\n")
        raise SystemExit(2) from None


def config_json(config: JobConfig) -> str:
    """Return the configuration as JSON text, in the order of `JobConfig`, with a newline at the end."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def _without_unsupported(settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings of supported keys. Raise ConfigError if another one turns its feature on; log the rest."""
    supported, ignored = [], []
    for setting in settings:
        if setting.key in KEYS:
            supported.append(setting)
        else:
            UNSUPPORTED[setting.key].check(setting.key, setting.text, setting.where)
            ignored.append(setting.key)
    if ignored:
        logger.info("Ignored keys of unsupported features, which are off: %s", ", ".join(ignored))
    return supported


def _config_of(settings: Iterable[Setting]) -> JobConfig:
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for setting in settings:
        section, _, name = setting.key.partition(".")
        kind = KEYS[setting.key]
        values[section][name] = kind.value(kind.checked(setting.text, setting.key, setting.where))
    return JobConfig(**{section: SECTIONS[section](**given) for section, given in values.items()})


def _print_help() -> None:
    parser = Parser(prog="train.py", usage="train.py [--section.key VALUE ...]", description=_DESCRIPTION, column=6)
    for section, cls in SECTIONS.items():
        parser.add_fields(parser.add_argument_group(section, cls.__doc__), cls, _key_default_text, section=section)
    parser.print_help()


def _key_default_text(default: object) -> str:
    if isinstance(default, bool):
        return f"({'on' if default else 'off'} by default)"
    if default is None:
        return "(unset by default)"
    text = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"(default: {text})" if text else "(empty by default)"


# Values of a torchtitan TOML that have another name here, or that mean what this package does not have.
#
# They are looked at before the kinds of values, whose errors name the nearest choice: for a family of models or a
# corpus that would be another run.


FAMILIES = ("llama3", "llama")
_C4 = {"training.dataset": "huggingface", "training.dataset_path": "allenai/c4", "training.dataset_subset": "en"}
DATASETS: Mapping[str, Mapping[str, str]] = {
    "c4": _C4,
    "c4_validation": {**_C4, "training.dataset_split": "validation"},
}
"""Names of torchtitan, with the keys that they stand for; those that are given themselves count."""


def check_family(model: Setting | None) -> None:
    """Raise ConfigError if a model of another family is named."""
    if model is not None and model.text.lower() not in FAMILIES:
        raise ConfigError(
            f"{model.where} = {model.text}: train.py trains only the family llama3. Train another model in a loop of "
            "your own, with the same checkpoints: docs/own_loop.md."
        )


def with_datasets(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """Return the last setting of each key, with what a dataset of torchtitan stands for in its place.

    Raises ConfigError for a dataset that this package does not have.
    """
    given = settings.get("training.dataset")
    if given is None:
        return settings
    name = given.text.lower().replace("-", "_")
    if name in DATASETS:
        meant = {key: Setting(key, text, given.where) for key, text in DATASETS[name].items()}
        return {**meant, **settings, "training.dataset": meant["training.dataset"]}
    choices = KEYS["training.dataset"].choices
    if not difflib.get_close_matches(given.text.lower(), choices, n=1):
        raise ConfigError(
            f"{given.where}: expected one of {', '.join(choices)}, found {given.text!r}. For a dataset of Hugging Face "
            "set --training.dataset=huggingface --training.dataset_path=NAME, which may be a folder of its files."
        )
    return settings


# The two sources of settings: a TOML file and the command line.
#
# Both are read into the same `Setting`s, in the order in which they were written, under the names of `JobConfig`
# however they are spelt. So of two settings of a key the last one wins, and later code need not know their source.


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
