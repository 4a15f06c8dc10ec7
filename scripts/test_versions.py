"""Run the tests with each version of torch that is supported, and print tables for docs/versions.md.

    python scripts/test_versions.py                                 # the fast tests, with every version
    python scripts/test_versions.py --torch 2.12 2.14 -- tests/checkpoint/format tests/distributed
    python scripts/test_versions.py --torch 2.15 --python python3.10 python3.13
    python scripts/test_versions.py --round-trips                   # who reads whose checkpoints, in place of tests

Makes an environment for each version, one at a time: all but 2.13.0 bring 5 GB of CUDA. It is removed after its tests,
unless --keep is given; then a later call uses it again. Arguments after -- go to ./run_tests.sh. A version that was
not run is `untried` in the table. Run it by hand, not in CI. The exit code is 1 if a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from version_tables import VERSIONS, Report, Row, counted, minor, ours, table_of_tests, tables_of_round_trips

ROOT = Path(__file__).resolve().parents[1]


class Environment:
    """A virtual environment with one version of torch, made from the interpreter `python`; in `folder`."""

    def __init__(self, folder: Path, version: str, python: str) -> None:
        asked = [python, "-c", "import platform; print(platform.python_version())"]
        self.python_version = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
        self.version, self._base = version, python
        minor_versions = [".".join(full.split(".")[:2]) for full in (version, self.python_version)]
        self.name = "torch-{}-python-{}".format(*minor_versions)
        self.root = folder / self.name
        self._log = folder / f"{self.name}.log"
        self._variables = {**os.environ, "PYTHON": str(self.root / "bin" / "python")}

    def make(self) -> bool:
        """Install torch, unless it is there; the packages of the tests come with `run_tests.sh`."""
        python = self.root / "bin" / "python"
        if not python.exists():
            subprocess.run([self._base, "-m", "venv", self.root], check=True)
        # Its cache would keep the 3 GB that are removed with the environment.
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir", "--quiet"]
        done = subprocess.run([*pip, f"torch=={self.version}"], check=False)
        return done.returncode == 0 and "pytest " in self._run_tests(["--version"]).splitlines()[-1]

    def remove(self) -> None:
        shutil.rmtree(self.root)

    def outcome(self, arguments: Sequence[str]) -> str:
        """Run the tests, with their output in a log file next to the environment. Return what pytest counted."""
        return counted(self._run_tests(["-q", *arguments]))

    def report(self) -> Report:
        """Return what each tool makes of the golden folder of each version."""
        command = [self._variables["PYTHON"], "-m", "tests.checkpoint.format.golden_of_torch"]
        variables = {**self._variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=variables, check=True, stdout=subprocess.PIPE, text=True)
        found: Report = json.loads(done.stdout.splitlines()[-1])
        return found

    def _run_tests(self, arguments: Sequence[str]) -> str:
        command = [str(ROOT / "run_tests.sh"), *arguments]
        with self._log.open("w") as log:
            subprocess.run(command, cwd=ROOT, env=self._variables, stdout=log, stderr=subprocess.STDOUT, check=False)
        return self._log.read_text(errors="replace")


def main() -> int:
    options = parse()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    reports: dict[str, Report] = {}
    for version in options.torch:
        for python in options.python:
            environment = Environment(options.folder, version, python)
            print(f"{environment.name} in {options.folder}", file=sys.stderr)
            is_made = environment.make()
            if options.round_trips and is_made:
                reports[minor(version)] = environment.report()
            else:
                outcome = environment.outcome(options.arguments) if is_made else "error: it could not be installed"
                tests = " ".join(options.arguments) or "fast"
                rows.append(Row(version, environment.python_version, tests, outcome, commit()))
            if not options.keep:
                environment.remove()
    print(tables_of_round_trips(reports) if options.round_trips else table_of_tests(rows), flush=True)
    outcomes = [row.outcome for row in rows] + [cell for table in reports.values() for cell in ours(table)]
    return 1 if any("failed" in outcome or "error" in outcome.lower() for outcome in outcomes) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    full = {minor(version): version for version in VERSIONS}
    parser.add_argument("--torch", nargs="+", default=list(full), choices=full, help="minor versions (default: all)")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="interpreters (default: this one)")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv-versions", help="of the environments and logs")
    parser.add_argument("--keep", action="store_true", help="leave the environments for the next call")
    parser.add_argument("--round-trips", action="store_true", help="read tests/golden/torch-*, in place of tests")
    parser.add_argument("arguments", nargs="*", help="of ./run_tests.sh")
    options = parser.parse_args()
    options.torch = [full[version] for version in options.torch]
    return options


def commit() -> str:
    """Return the short name of the commit, with a plus if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
