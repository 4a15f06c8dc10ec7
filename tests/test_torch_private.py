"""Private and deprecated names of torch are used in one module only, which lists them all."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from scripts.structure.torch_names import NAMES, SOME_VERSIONS
from tests.source_modules import PACKAGE, ROOT, Module, is_in, modules_of
from torchtitan_lite.torch_private import is_compiled

DEADLINE_SECONDS = 120.0
HOME = Module(ROOT / PACKAGE / "torch_private.py")
OTHERS = [
    each
    for each in (*modules_of(ROOT / PACKAGE), *modules_of(ROOT / "scripts"), Module(ROOT / "train.py"))
    if each.path != HOME.path
]
ATTRIBUTES = {each.rpartition(".")[2] for each in NAMES}
OURS = {"_buffers", "_metadata", "_schedulers"}
"""Attributes that a class of ours has, too: `self._schedulers` is not torch's."""


def private(dotted: str) -> bool:
    """Return whether `dotted` is a name of torch with a component that begins with an underscore."""
    return is_in(dotted, ["torch"]) and any(re.match("_[^_]", each) for each in dotted.split("."))


def dotted_uses(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield the names of torch that `module` imports or writes in full."""
    yield from module.imports()
    yield from module.uses


def attributes(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each attribute that `module` uses of an object, also those that `getattr` and its kin name."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not (is_own and node.attr in OURS):
                yield node, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            named = node.args[1]
            if node.func.id in ("getattr", "hasattr", "setattr", "delattr") and isinstance(named, ast.Constant):
                yield node, str(named.value)


def test_no_other_module_names_something_private_of_torch() -> None:
    findings = [
        module.at(node, f"uses {used}") for module in OTHERS for node, used in dotted_uses(module) if private(used)
    ]
    assert not findings, "move it to torch_private:\n" + "\n".join(findings)


def test_no_other_module_uses_an_attribute_that_is_listed() -> None:
    findings = [
        module.at(node, f"uses {used}") for module in OTHERS for node, used in attributes(module) if used in ATTRIBUTES
    ]
    assert not findings, "use a function of torch_private:\n" + "\n".join(findings)


def test_whatever_the_one_module_uses_is_listed() -> None:
    listed = {part for each in NAMES for part in re.split(r"[.\[\]()]+", each)}
    used = {used.rpartition(".")[2] for _, used in dotted_uses(HOME) if private(used)}
    used |= {name for _, name in attributes(HOME) if re.match("_[^_]", name) or name.startswith("__create")}
    assert used <= listed


PLAIN = [each for each in NAMES if re.fullmatch(r"[\w.]+", each)]
"""Those that need no object."""


@pytest.mark.parametrize("name", PLAIN)
def test_this_torch_has_a_listed_name_of_a_module_or_a_class(name: str) -> None:
    """Attributes that only objects have are found missing by the tests of what uses them, and by the next one."""
    if name in SOME_VERSIONS and not _is_in(SOME_VERSIONS[name]):
        pytest.skip("this version has it no more, or was not tried")
    assert _has(name), f"{name} is missing: {NAMES[name]}"


def _is_in(versions: str) -> bool:
    """Return whether the running torch is in `versions`, as in "2.11 to 2.13"."""
    first, _, last = versions.partition(" to ")
    running, low, high = (tuple(map(int, each.split(".")[:2])) for each in (torch.__version__, first, last or first))
    return low <= running <= high


def _has(dotted: str) -> bool:
    parts = dotted.split(".")
    for number in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:number]))
        except ImportError:
            continue
        for part in parts[number:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_objects_of_this_torch_have_the_listed_attributes() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader([1, 2], num_workers=1)
    parts = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ConstantLR(optimizer)]
    objects: dict[str, object] = {
        "torch.nn.Module()": model,
        "torch.nn.Module().state_dict()": model.state_dict(),
        "torch.utils.data.DataLoader()": loader,
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter()": iter(loader),
        "torch.optim.lr_scheduler.LRScheduler()": parts[0],
        "torch.optim.lr_scheduler.SequentialLR()": torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [3]),
        "torch._dynamo.eval_frame.OptimizedModule()": torch.compile(model, backend="eager"),
    }
    listed = [each.rpartition(".") for each in NAMES]
    missing = [f"{of}.{name}" for of, _, name in listed if of in objects and not hasattr(objects[of], name)]
    assert not missing
    assert objects.keys() <= {of for of, _, _ in listed}


def test_a_compiled_module_is_recognised() -> None:
    model = nn.Linear(1, 1)
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model, backend="eager"))


LOADED = """
import sys
import torch
from torchtitan_lite.torch_private import load_compiler
before = "torch._dynamo" in sys.modules
load_compiler()
print(before, "torch._dynamo" in sys.modules)
"""


@pytest.mark.slow  # A new interpreter with torch.
def test_the_compiler_is_loaded_when_a_start_asks_for_it() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (done.returncode, done.stdout) == (0, "False True\n"), done.stderr


SIMULATED = """
import torch.distributed
from torchtitan_lite.distributed.process_group import init_simulated_ranks
init_simulated_ranks(3)
print(torch.distributed.get_world_size())
"""


@pytest.mark.slow  # A new interpreter with torch.
def test_ranks_are_simulated_whatever_of_torch_was_imported_before() -> None:
    done = subprocess.run([sys.executable, "-c", SIMULATED], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
