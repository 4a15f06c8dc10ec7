"""wandb as it may be found on a machine: missing, or without something that it needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchtitan_lite.errors import ExtraMissing
from torchtitan_lite.metrics.logger import WandbRun

FIX = "Install it with: pip install 'torchtitan-lite[wandb]'"


def test_a_missing_wandb_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ExtraMissing) as raised:
        WandbRun(tmp_path)
    assert str(raised.value) == f"wandb is not installed. {FIX}"


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ("import a_module_that_wandb_needs", "No module named 'a_module_that_wandb_needs'"),
        ("raise ImportError('libc.so.7: cannot open it')", "libc.so.7: cannot open it"),
        ("raise ImportError", "ImportError"),
    ],
)
def test_a_wandb_that_lacks_what_it_needs_is_called_that(
    source: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(ExtraMissing) as raised:
        WandbRun(tmp_path)
    assert str(raised.value) == f"wandb cannot be imported: {finding}. {FIX}"
