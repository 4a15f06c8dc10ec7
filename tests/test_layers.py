"""The layers of the package, checked on its syntax. docs/design.md explains them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from scripts.structure.source import FLATS
from tests.source_modules import PACKAGE, ROOT, Module, dotted, is_in, modules_of
from torchtitan_lite.events import EVENTS

LAYERS = {
    part: number
    for number, floor in enumerate(floor for floors in FLATS.values() for floor in floors)
    for part in floor
}
"""Each part imports only from parts with lower numbers; the floors of the flats one above the other."""
DOORS = {
    ("checkpoint", "checkpoint.companions"): "the manager has a list of what accompanies a run",
    ("checkpoint", "hugging_face"): "the package gives the public names of a model in other files",
}
"""The two places where the core knows what is above it."""

WITHOUT_TORCH = (
    *(
        "__init__",
        "errors",
        "events",
        "event_lines",
        "faults",
        "log",
        "collection",
        "host_memory",
        "disk",
        "store",
        "config",
        "memory.keeper",
    ),
    *("bucket", "stores", "checkpoint.run_folders", "uploading"),
    *(f"checkpoint.format.{name}" for name in ("contents", "dtypes", "plain_value", "structure")),
    *(f"checkpoint.untrusted.{name}" for name in ("inert_pickle", "safe_metadata", "saved_file", "stock_item")),
    *("checkpoint.untrusted.safetensors_header", "checkpoint.reading.files"),
    "checkpoint.reading.folder",
    *(f"memory.images.{name}" for name in ("card", "mapped_reader", "memory_budget")),
    *("memory.images.snapshot_match", "memory.images.tier", "checkpoint.staging.mark"),
    *(f"examining.{name}" for name in ("opened", "inventory", "summary")),
    *(f"examining.{name}" for name in ("verification", "file_digests", "item_checksums")),
    *("examining.difference", "examining.presence"),
    *("hugging_face.known_model", "models.llama.args", "models.llama.hugging_face"),
    "models.llama.config_file",
    "metrics.ledger",
    *("accounts", "json_lines", "examining.listed_tree", "examining.verified"),
    *("cli.verify", "cli.diff"),
    *("preflight", "data.batch_size", "data.tokenizer"),
    *("report", "cli.report", "hangs"),
    *("cli.app", "cli.exit_codes", "cli.inspect_step", "cli.ls", "cli.memory"),
    *("cli.named_checkpoint", "cli.screen"),
)
OF_CHECKPOINTS = tuple(part for floor in FLATS["extras"] for part in floor)
NOT_EVEN_BELOW = {
    # What reads or makes checkpoints builds no run, and a report no trainer.
    ("examining", "converting", "importing", "uploading"): ("checkpoint.manager", "checkpoint.saving"),
    ("hugging_face", "uploads", "memory"): ("checkpoint.manager",),
    ("report",): ("trainer", "train", "preflight", "integrations"),
    # Only loops have a watch of hangs.
    ("models", "data", "metrics", "optim", "parallelisms", "divergence", "preflight", "report"): ("hangs",),
    ("memory", "uploads", "hugging_face", "importing", "converting", "checkpoint.companions"): ("hangs",),
    # What reads lines, and what outlives the trainer, knows no checkpoint.
    ("accounts", "event_lines", "json_lines", "memory.keeper"): ("checkpoint", "bucket", "stores", "distributed"),
}
"""What a room does not import although it stands lower."""
UNKNOWN_TO_CHECKPOINT = ("models", "data", "trainer", "metrics", "optim", "divergence", "parallelisms")
TENSORBOARD = ("tensorboard", "torch.utils.tensorboard", "tensorboardX")
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single"),
    *(
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "gather",
        "gather_object",
        "irecv",
        "isend",
    ),
    *(
        "monitored_barrier",
        "new_group",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
    ),
    *("scatter", "scatter_object_list", "send", "send_object_list", "destroy_process_group", "init_process_group"),
)
NAMES_ON_DISK = (
    *("step-", ".metadata", ".distcp", "manifest.json", ".staging", ".corrupt", ".abandoned", ".trash", ".replaced"),
    ".weights",
    *("writer.lock", "pins.json"),
)
NO_EVENTS = {
    "faults": ("committed",),
    "store.store": ("committed",),
    "bucket.saves": ("committed",),
    "examining.inventory": ("committed", "quarantined"),
    "report.saved_steps": ("purged", "quarantined"),
    "cli.ls": ("uploaded",),
    "cli.upload": ("uploaded",),
}
"""The same words with another meaning: a point for faults, states of a folder, words of a page."""
DANGEROUS_ON_DISK = (
    "os.fsync",
    "os.fdatasync",
    "os.replace",
    "os.rename",
    "os.renames",
    "shutil.rmtree",
    "shutil.move",
)
CHOICES = ("async_mode", "interval_type", "export_dtype", "keep_latest_k", "when_busy")


MODULES = modules_of(ROOT / PACKAGE)


def part_of(module_name: str) -> str:
    """Return the longest entry of the table that `module_name` belongs to."""
    parts = [part for part in LAYERS if is_in(module_name, [part])]
    assert parts, f"{module_name} is in no layer: give it one in LAYERS"
    return max(parts, key=len)


def imports_of_ours(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for node, imported in module.imports():
        if is_in(imported, [PACKAGE]):
            yield node, imported.removeprefix(PACKAGE).lstrip(".") or "__init__"


def modules_outside(*packages: str) -> list[Module]:
    return [module for module in MODULES if not is_in(module.name, packages)]


def modules_in(*packages: str) -> list[Module]:
    return [module for module in MODULES if is_in(module.name, packages)]


def test_a_module_imports_only_from_layers_below_and_from_its_own_part() -> None:
    findings = []
    for module in MODULES:
        part = part_of(module.name)
        for node, imported in imports_of_ours(module):
            other = part_of(imported if is_in(imported, LAYERS) else "__init__")
            is_door = any(part == room and is_in(imported, [behind]) for room, behind in DOORS)
            if other != part and LAYERS[other] >= LAYERS[part] and not is_door:
                findings.append(module.at(node, f"{part} imports {imported}"))
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(("rooms", "unknown"), NOT_EVEN_BELOW.items())
def test_a_room_does_not_import_what_it_has_no_use_for(rooms: Sequence[str], unknown: Sequence[str]) -> None:
    findings = [
        module.at(node, f"imports {imported}")
        for module in modules_in(*rooms)
        for node, imported in imports_of_ours(module)
        if is_in(imported, unknown)
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_each_entry_of_the_tables_is_there() -> None:
    names = {module.name for module in MODULES}
    for entry in {
        *WITHOUT_TORCH,
        *LAYERS,
        *(room for rooms, unknown in NOT_EVEN_BELOW.items() for room in (*rooms, *unknown)),
    }:
        assert any(is_in(name, [entry]) for name in names), f"{entry} is no module and no room"


def test_no_modules_import_one_another_in_a_circle() -> None:
    """Not for types either, nor in functions: whoever reads one of them would have to read all."""
    names = {module.name for module in MODULES}

    def home(imported: str) -> str:
        """Return the module that an imported name is, or is in."""
        while imported and imported not in names:
            imported = imported.rpartition(".")[0]
        return imported or "__init__"

    graph = {module.name: {home(imported) for _, imported in imports_of_ours(module)} for module in MODULES}
    try:
        TopologicalSorter({name: uses - {name} for name, uses in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_modules_for_a_login_node_import_no_torch() -> None:
    findings = [
        module.at(node, f"imports {imported}")
        for module in modules_in(*WITHOUT_TORCH)
        for node, imported in module.imports()
        if is_in(imported, ["torch", "numpy"])
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_modules_for_a_login_node_load_no_torch() -> None:
    names = [f"{PACKAGE}.{module.name}" for module in modules_in(*WITHOUT_TORCH) if module.name != "__init__"]
    script = f"import sys, {', '.join(names)}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


def test_checkpoint_knows_no_model_no_data_and_no_trainer() -> None:
    findings = [
        module.at(node, f"imports {imported}")
        for module in modules_in("checkpoint", *OF_CHECKPOINTS)
        for node, imported in imports_of_ours(module)
        if is_in(imported, UNKNOWN_TO_CHECKPOINT)
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_only_layout_spells_a_name_on_disk() -> None:
    findings = [
        module.at(node, f"spells {text!r}")
        for module in modules_outside("store.layout")
        for node, text in _texts(module)
        if len(text.split()) == 1  # more words are a message
        and not text.startswith("torch.")  # a module name
        and any(name in text for name in NAMES_ON_DISK)
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_only_events_spells_the_name_of_an_event() -> None:
    findings = [
        module.at(node, f"spells {text!r}")
        for module in modules_outside("events")
        for node, text in _texts(module)
        if text in EVENTS and text not in NO_EVENTS.get(module.name, ())
    ]
    assert not findings, "\n" + "\n".join(findings)


def _texts(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each string that is not a docstring; the parts of an f-string are joined."""
    skipped: set[int] = set()
    for node in module.nodes:  # breadth first: parents come before their parts
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            yield node, "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node, node.value


def test_only_durable_syncs_renames_and_removes_trees() -> None:
    findings = []
    for module in modules_outside("disk.durable"):
        findings += [module.at(node, f"uses {used}") for node, used in module.uses if used in DANGEROUS_ON_DISK]
        findings += [module.at(node, "renames a path") for node in module.nodes if _renames_a_path(module, node)]
    assert not findings, "\n" + "\n".join(findings)


def _renames_a_path(module: Module, node: ast.AST) -> bool:
    """Return whether `node` is `path.rename(x)` or `path.replace(x)`.

    Two arguments are `durable.rename(src, dst)` or the `replace` of a string.
    """
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("rename", "replace")
        and len(node.args) == 1
        and not node.keywords
        and not is_in(module.bindings.get(dotted(node.func).split(".")[0], ""), ["dataclasses", "copy"])
    )


def test_only_distributed_calls_a_collective() -> None:
    collectives = {f"torch.distributed.{name}" for name in COLLECTIVES}
    findings = [
        module.at(node, f"uses {used}")
        for module in modules_outside("distributed")
        for node, used in module.uses
        if used.replace(".distributed_c10d.", ".") in collectives or "_functional_collectives" in used
    ]
    assert not findings, "\n" + "\n".join(findings)


@pytest.mark.parametrize(
    "policies",
    ["checkpoint.schedule.interval", "checkpoint.schedule.optimum", "store.retention"],
)
def test_policies_read_no_clock(policies: str) -> None:
    findings = [
        module.at(node, f"imports {imported}")
        for module in modules_in(policies)
        for node, imported in module.imports()
        if is_in(imported, ["time", "datetime"])
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_a_choice_in_the_config_is_read_only_where_its_object_is_built() -> None:
    findings = []
    for module in modules_outside("config"):
        builders = [node for node in module.nodes if _is_builder(node)]
        in_builders = {id(node) for builder in builders for node in ast.walk(builder)}
        findings += [
            module.at(node, f"decides by {choice}")
            for node in module.nodes
            if id(node) not in in_builders
            for choice in _choices_decided_by(node)
        ]
    assert not findings, "\n" + "\n".join(findings)


def _is_builder(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("build_")


def _choices_decided_by(node: ast.AST) -> list[str]:
    compared: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        compared = [node.left, *node.comparators]
    elif isinstance(node, ast.Match):
        compared = [node.subject]
    return [side.attr for side in compared if isinstance(side, ast.Attribute) and side.attr in CHOICES]


@pytest.mark.parametrize(
    ("part", "packages"),
    [
        ("metrics", TENSORBOARD),
        ("bucket.objects", ("obstore",)),
        ("bucket.s3_parts", ("boto3", "botocore")),
    ],
)
def test_only_one_part_knows_a_package(part: str, packages: Sequence[str]) -> None:
    findings = [
        module.at(node, f"imports {imported}")
        for module in modules_outside(part)
        for node, imported in module.imports()
        if is_in(imported, packages)
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_the_manager_touches_no_path_no_clock_and_no_collective_itself() -> None:
    findings = [
        module.at(node, f"calls {used}")
        for module in modules_in("checkpoint.manager")
        for node in module.nodes
        if isinstance(node, ast.Call)
        for called, used in module.uses
        if called is node.func and is_in(used, ["os", "re", "time", "torch.distributed"])
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_only_one_module_reads_the_environment() -> None:
    findings = [
        module.at(node, f"uses {used}")
        # The keeper passes it on.
        for module in modules_outside("distributed.environment", "memory.keeper.starting")
        for node, used in module.uses
        if used in ("os.environ", "os.environb", "os.getenv")
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_no_class_has_a_del() -> None:
    findings = [
        module.at(node, "defines __del__")
        for module in MODULES
        for node in module.nodes
        if isinstance(node, ast.FunctionDef) and node.name == "__del__"
    ]
    assert not findings, "\n" + "\n".join(findings)


def test_every_module_has_a_docstring() -> None:
    findings = [
        module.at(module.tree, "no docstring") for module in MODULES if module.tree.body and not _has_docstring(module)
    ]
    assert not findings, "\n" + "\n".join(findings)


def _has_docstring(module: Module) -> bool:
    return bool((ast.get_docstring(module.tree) or "").strip())


IMPORT_OF_TESTS = re.compile(r"^ *(from tests[\w.]* import (?:\([^)]*\)|.*)|import tests.*)$", re.MULTILINE)


@cache
def _imports_of_tests() -> dict[str, set[str]]:
    """Return for each file of tests the other ones that it imports."""
    texts = {module.name: module.path.read_text(encoding="utf-8") for module in modules_of(ROOT / "tests")}
    found: dict[str, set[str]] = {name: set() for name in texts}
    for name, text in texts.items():
        for match in IMPORT_OF_TESTS.finditer(text):  # Parses these lines only: all files would take seconds.
            (node,) = ast.parse(match[1]).body
            assert isinstance(node, ast.Import | ast.ImportFrom)
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            named = {f"{of}{alias.name}" for alias in node.names} | {of.rstrip(".")}
            found[name] |= (named & texts.keys()) - {name}
    return found


def _is_of_tests(name: str) -> bool:
    return name.rpartition(".")[2].startswith("test_")


def test_no_file_of_tests_imports_a_test_module() -> None:
    found = [f"{name}: {each}" for name, found in _imports_of_tests().items() for each in found if _is_of_tests(each)]
    assert not found, "move what they share to a helper file"


def test_helpers_of_tests_are_at_most_three_files_deep() -> None:
    """Whoever reads a test opens its helper, the helper of that one, and one more."""
    imported, chains = _imports_of_tests(), dict[str, list[str]]()
    for name in TopologicalSorter(imported).static_order():  # A circle raises CycleError, which names its files.
        chains[name] = [name, *max((chains[each] for each in imported[name]), key=len, default=[])]
    helpers = [name for name in chains if not _is_of_tests(name) and not name.endswith(".__main__")]
    found = [" > ".join(chains[name]) for name in helpers if len(chains[name]) > 3]
    assert not found, "\n".join(["merge helpers by their subject:", *found])
