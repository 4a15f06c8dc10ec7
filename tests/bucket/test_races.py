"""Processes that take one folder at the same moment, on a real server: one of them gets it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PROCESSES = 8
PROCESS = """
import sys
from torchtitan_lite.bucket.store import open_bucket
from torchtitan_lite.errors import FolderInUse

lease = None
for line in sys.stdin:
    command, *arguments = line.split()
    if command == "take":
        lease = open_bucket(arguments[0]).lease("run0", 6.0)
        try:
            lease.take()
            print("taken", flush=True)
        except FolderInUse:
            lease = None
            print("in use", flush=True)
    elif command == "check":
        if lease is not None:
            lease.check()
        print("checked", flush=True)
    else:
        if lease is not None:
            lease.release()
        print("released", flush=True)
"""


class Contender:
    """A process that obeys commands."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            cwd=REPO,
            env=dict(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, command: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{command}\n")
        self._popen.stdin.flush()

    def answer(self) -> str:
        assert self._popen.stdout is not None
        return self._popen.stdout.readline().strip()

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


@pytest.fixture(params=["S3", "Azure"])
def raced(request: pytest.FixtureRequest) -> str:
    """The address of the folder; the environment leads to its server."""
    return str(request.getfixturevalue({"S3": "folder", "Azure": "azure_folder"}[request.param]))


@pytest.fixture
def contenders(raced: str) -> Iterator[list[Contender]]:
    started = [Contender() for _ in range(PROCESSES)]
    yield started
    for each in started:
        each.close()


def race(contenders: list[Contender], folder: str) -> list[str]:
    """Let all take `folder` at once; return their answers, after the winner found that it still holds it."""
    answers = said(contenders, f"take {folder}")
    assert said(contenders, "check") == ["checked"] * len(contenders)
    return answers


def said(contenders: list[Contender], command: str) -> list[str]:
    for each in contenders:
        each.begin(command)
    return [each.answer() for each in contenders]


@pytest.mark.slow
@pytest.mark.parametrize(
    "races", [1, pytest.param(15, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.exhaustive)]
)
def test_of_eight_processes_one_gets_a_new_folder_and_one_a_folder_that_was_given_up(
    contenders: list[Contender], raced: str, races: int
) -> None:
    for number in range(races):
        for _ in range(2):  # Twice: new, and given up.
            answers = race(contenders, f"{raced}-{number}")
            assert sorted(answers) == ["in use"] * (PROCESSES - 1) + ["taken"]
            said(contenders, "release")


def test_of_seven_processes_one_gets_the_folder_of_a_process_that_was_killed(
    contenders: list[Contender], raced: str
) -> None:
    contenders[0].begin(f"take {raced}")
    assert contenders[0].answer() == "taken"
    contenders[0].close()
    answers = race(contenders[1:], raced)
    assert sorted(answers) == ["in use"] * (PROCESSES - 2) + ["taken"]
