"""The measurement of saves and loads in an object store."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_bucket.py"


@pytest.mark.exhaustive
def test_it_compares_a_store_with_a_disk_and_with_its_client_alone(folder: str, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), folder, "--mb", "8", "--rounds", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert "store / disk" in lines[0]
    assert "store / client" in lines[1]
    assert "store / client" in lines[2]
    assert "MiB" in lines[3]
