"""Everything that the documentation names exists, and its programs run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import FORKED_RANKS, Forked, run_module, run_script
from tests.resharding.jobs import TOPOLOGIES
from torchtitan_lite.config.drift import ALLOWED_BY_EXCLUSION, IGNORED, REFUSED, WARNED, Rule, rule_of
from torchtitan_lite.config.keys import KEYS, SECTIONS, meaning_of
from torchtitan_lite.disk.digest import FileRecord
from torchtitan_lite.events import EVENTS
from torchtitan_lite.store.manifest import CheckpointKind, Manifest

ROOT = Path(__file__).parents[2]
OWN_PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*OWN_PAGES, ROOT / "CONTRIBUTING.md"]
ONE_PROCESS, SHARDED = "own_loop.py", "own_fsdp_loop.py"
README_WORDS = 900
DEADLINE_SECONDS = 120.0

LINK = re.compile(r"\[[^]\n]*\]\(([^)\s]+)\)")
PATH = re.compile(r"(?<![\w./-])(?:\./)?((?:torchtitan_lite|scripts|tests|train_configs|docs)/[\w./-]*\w)")
COMMAND = re.compile(r"(?<![\w/-])(?:\./)?(run_train\.sh|run_tests\.sh|train\.py|requirements\.txt|pyproject\.toml)\b")
MODULE = re.compile(r"\btorchtitan_lite(?:\.\w+)+")
OPTION = re.compile(rf"--((?:{'|'.join(SECTIONS)})\.\w+)")
KEY = re.compile(rf"`((?:{'|'.join(SECTIONS)})\.\w+)`")
NO_KEYS = {"metrics.jsonl", "model.safetensors"}
"""Files."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_an_existing_file_and_heading(page: Path) -> None:
    broken = []
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def test_the_index_links_every_page_and_the_readme_links_the_index() -> None:
    linked = set(LINK.findall((ROOT / "docs" / "index.md").read_text(encoding="utf-8")))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"} <= linked
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_events_that_the_first_run_names_are_events() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"one line for each event: ([\w, ]+) \.\.\.", page)
    assert set(named.split(", ")) <= EVENTS.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_and_command_on_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {*PATH.findall(text), *COMMAND.findall(text)}
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_on_a_page_exists(page: Path) -> None:
    assert not [name for name in MODULE.findall(page.read_text(encoding="utf-8")) if not _is_in_the_package(name)]


@pytest.mark.parametrize("page", OWN_PAGES, ids=lambda page: page.name)
def test_every_key_on_a_page_is_a_key(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = {*OPTION.findall(text), *KEY.findall(text)} - NO_KEYS
    assert not [name for name in named if name not in KEYS and meaning_of(name.replace(".no_", ".", 1)) is None]


def test_the_manifest_on_the_format_page_has_the_fields_of_a_manifest() -> None:
    (example,) = _blocks(ROOT / "docs" / "checkpoint_format.md", "json")
    manifest = Manifest(
        step=1, kind=CheckpointKind.FULL, created_at=0.0, world_size=1, versions={}, files={"a": FileRecord.of(b"a")}
    )
    shown, written = json.loads(example), json.loads(manifest.to_json())
    assert shown.keys() <= written.keys()
    assert all(record.keys() <= written["files"]["a"].keys() for record in shown["files"].values())
    assert shown["kind"] in {kind.value for kind in CheckpointKind}
    assert shown["lineage"].keys() == written["lineage"].keys()


def test_the_rules_for_changed_keys_on_the_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "partial_loads.md").read_text(encoding="utf-8")
    _, _, below = page.partition(
        "<!-- rules: from torchtitan_lite/config/drift.py; tests/docs/test_docs.py compares -->\n"
    )
    shown, _, _ = below.partition("<!-- end of rules -->")
    assert shown == _rules_of_changes(), f"Replace the rules by:\n{_rules_of_changes()}"


def test_the_page_has_every_topology_whose_pairs_are_tested() -> None:
    page = (ROOT / "docs" / "parallelisms.md").read_text(encoding="utf-8")
    _, _, below = page.partition("<!-- topologies: tests/docs/test_docs.py compares -->\n\n")
    assert below.partition("\n\n<!-- end of topologies -->")[0] == ", ".join(TOPOLOGIES)
    assert len(TOPOLOGIES) ** 2 == 100 and "In all hundred pairs" in page


def test_the_readme_is_short_and_its_loop_resumes_when_it_is_pasted_and_run_twice(tmp_path: Path) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.split()) <= README_WORDS
    (loop,) = _blocks(ROOT / "README.md", "python")
    (tmp_path / "loop.py").write_text(loop)
    said = [_forked_output_of(tmp_path / "loop.py").strip() for _ in range(2)]
    assert re.findall(r"^It prints `(.+)`, then `(.+)`\.$", page, re.MULTILINE) == [(*said,)]
    steps = {path.name for path in (tmp_path / "demo").iterdir() if path.name.startswith("step-")}
    assert steps == {"step-500", "step-600"}


def test_the_loop_of_one_process_runs_resumes_and_is_read_into_a_plain_module(tmp_path: Path) -> None:
    script = _write_example(ONE_PROCESS, tmp_path)
    first = _forked_output_of(tmp_path / script, "200")
    assert "a fresh start" in first and "step 200: loss" in first
    (reads,) = _blocks(ROOT / "docs" / "parallelisms.md", "python")
    with (tmp_path / script).open("a") as file:
        file.write(f"trained = model\n{reads}print('read:', torch.equal(model[0].weight, trained[0].weight))\n")
    again = _forked_output_of(tmp_path / script, "300")
    assert "Loading the checkpoint at step 200." in again
    assert re.findall(r"^step (\d+):", again, re.MULTILINE) == ["250", "300"]
    assert _checkpoints(tmp_path / "outputs") == {"step-200", "step-300"}
    assert "read: True" in again


@pytest.mark.slow
def test_the_sharded_loop_runs_on_two_processes_and_resumes_on_one(tmp_path: Path) -> None:
    script = _write_example(SHARDED, tmp_path)
    torchrun, options = "torch.distributed.run", ["--standalone", "--local-addr=localhost"]
    first = _output_of([sys.executable, "-m", torchrun, *options, "--nproc_per_node=2", script, "200"], tmp_path)
    assert first.count("a fresh start") == 1, "one rank reports what concerns all"
    arguments, log = [*options, "--nproc_per_node=1", script, "300"], tmp_path / "again.log"
    again = _logged(run_module(torchrun, arguments, log, os.environ | FORKED_RANKS, tmp_path), log)
    assert "Loading the checkpoint at step 200." in again and "step 300: loss" in again
    assert _checkpoints(tmp_path / "outputs_fsdp") == {"step-100", "step-200", "step-300"}


def _rules_of_changes() -> str:
    """Return the part of docs/partial_loads.md between its marks."""
    honoured = {
        section: [key.partition(".")[2] for key in KEYS if key.startswith(f"{section}.") and _is_honoured(key)]
        for section in SECTIONS
    }
    lines = ["### Refused", "", "| key | fix | allowed while this is excluded |", "| --- | --- | --- |"]
    lines += [f"| `{key}` | {fix} | {_quoted(ALLOWED_BY_EXCLUSION.get(fix))} |" for key, fix in REFUSED.items()]
    lines += ["", "### Honoured, with a warning", "", "| key | what follows |", "| --- | --- |"]
    lines += [f"| `{key}` | {note} |" for key, note in WARNED.items()]
    lines += ["", "### Honoured", "", "| section | keys |", "| --- | --- |"]
    lines += [f"| `{name}` | {', '.join(map(_quoted, keys))} |" for name, keys in honoured.items() if keys]
    lines += ["", "### Not compared", "", f"{', '.join(map(_quoted, sorted(IGNORED)))}."]
    return "\n".join(lines) + "\n"


def _is_honoured(key: str) -> bool:
    return rule_of(key) is Rule.HONOURED


def _quoted(name: str | None) -> str:
    return f"`{name}`" if name else ""


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def _write_example(name: str, folder: Path) -> str:
    """Write the program of the page, or that it links, that is named `name` into `folder`. Return `name`."""
    (one_process,) = _blocks(ROOT / "docs" / "own_loop.md", "python")
    sharded = (ROOT / "docs" / "examples" / SHARDED).read_text(encoding="utf-8")
    (folder / name).write_text(one_process if name == ONE_PROCESS else sharded)
    return name


def _forked_output_of(script: Path, *arguments: str) -> str:
    log = script.with_suffix(".log")
    log.write_text("")
    return _logged(run_script(script, arguments, log, os.environ, script.parent), log)


def _logged(process: Forked, log: Path) -> str:
    assert process.wait(DEADLINE_SECONDS) == 0, log.read_text()
    return log.read_text()


def _output_of(command: list[str], folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def _checkpoints(dump_folder: Path) -> set[str]:
    return {path.name for path in (dump_folder / "checkpoint").iterdir()}


def _anchors(page: Path) -> set[str]:
    """Return the anchors of all headings: lower case, no punctuation, hyphens for spaces."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _headings(page)}


def _headings(page: Path) -> Iterator[str]:
    for match in re.finditer(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        yield match[1]


def _is_in_the_package(name: str) -> bool:
    """Return whether `name` is a module, or a name in one."""
    path = ROOT.joinpath(*name.split("."))
    if path.exists() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists():
        return True
    door = path.parent / "__init__.py"
    return door.exists() and path.name in _exported_by(door)


def _exported_by(module: Path) -> list[str]:
    """Return the names in `__all__` of `module`."""
    names = re.search(r"^__all__ = \[(.*?)\]$", module.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return re.findall(r'"(\w+)"', names[1]) if names else []
