"""The script of many real ranks: a kill is survived and counted, and a state that differs on one rank is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.many_ranks.starts import Ended, Start, differing

ROOT = Path(__file__).parents[1]


@pytest.mark.exhaustive  # Three starts of four processes, and their server: about 10 s on idle cores.
def test_a_job_whose_coordinator_is_killed_counts_as_found_again(tmp_path: Path) -> None:
    few = ["--few", "4", "--parts", "kills", "--points", "manifest", "--json", str(tmp_path / "found.json")]
    command = [sys.executable, str(ROOT / "scripts" / "try_many_ranks.py"), *few, "--folder", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [found[name] for name in ("kills", "found", "lost", "wrong", "left", "signalled")] == [1, 1, 0, 0, 0, 0]
    assert [(each["point"], each["resumed"]) for each in found["records"]] == [("manifest", 2)]


def test_a_state_that_differs_on_one_rank_is_named() -> None:
    straight = _ended([_line("trained", 2, "a"), _line("trained", 3, "b")], [_line("trained", 2, "c")])

    equal = _ended([_line("resumed", 2, "a"), _line("trained", 3, "b")], [_line("resumed", 2, "c")])
    assert differing(equal, straight) == []
    assert differing(_ended([_line("trained", 3, "x")], [_line("resumed", 2, "x")]), straight) == [
        "step 3 of rank 0",
        "step 2, resumed by rank 1",
    ]


def _line(event: str, step: int, digest: str) -> dict[str, Any]:
    return {"event": event, "step": step, "losses": ["0x1p+0"], "digest": digest}


def _ended(*lines: list[dict[str, Any]]) -> Ended:
    return Ended(Start(Path(), "FSDP2 2", 2), [0, 0], 1.0, 1.0, 1.0, [*lines], "")
