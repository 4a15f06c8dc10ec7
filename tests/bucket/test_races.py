"""Processes that take one folder at the same moment, on a real server: one of them gets it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples import examples

REPO = Path(__file__).parents[2]
PROCESSES = 8
PROCESS = """
import sys
from torchtitan_lite.bucket.bucket_store import open_bucket
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
_numbers = itertools.count(1)


class Contender:
    """A process that obeys commands."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            cwd=REPO,
            env=os.environ | environment,
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


@pytest.fixture(scope="module", params=["s3", "az"])
def contenders(request: pytest.FixtureRequest) -> Iterator[list[Contender]]:
    """Processes, of which the last is for one test alone."""
    if request.param == "s3":
        environment = request.getfixturevalue("s3").environment
    else:
        environment = request.getfixturevalue("azure")
    started = [Contender(environment) for _ in range(PROCESSES + 1)]
    yield started
    for each in started:
        each.close()


@pytest.fixture
def raced(contenders: list[Contender], request: pytest.FixtureRequest) -> str:
    """The address of a folder that no other test uses."""
    return f"{request.node.callspec.params['contenders']}://checkpoints/raced-{next(_numbers)}"


def race(contenders: list[Contender], folder: str) -> list[str]:
    """Let all take `folder` at once; return their answers, after the winner found that it still holds it."""
    answers = said(contenders, f"take {folder}")
    assert said(contenders, "check") == ["checked"] * len(contenders)
    return answers


def said(contenders: list[Contender], command: str) -> list[str]:
    for each in contenders:
        each.begin(command)
    return [each.answer() for each in contenders]


@pytest.mark.promise("Of several jobs that take a folder at once, one gets it.", section="bucket")
@pytest.mark.slow
@pytest.mark.parametrize("races", [5, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_of_eight_processes_one_gets_a_new_folder_and_one_a_folder_that_was_given_up(
    contenders: list[Contender], raced: str, races: int
) -> None:
    eight = contenders[:PROCESSES]
    for number in range(examples(races)):
        for _ in range(2):  # Twice: new, and given up.
            answers = race(eight, f"{raced}-{number}")
            assert sorted(answers) == ["in use"] * (PROCESSES - 1) + ["taken"]
            said(eight, "release")


@pytest.mark.slow
def test_of_eight_processes_one_gets_the_folder_of_a_process_that_was_killed(
    contenders: list[Contender], raced: str
) -> None:
    *others, killed = contenders
    assert said([killed], f"take {raced}") == ["taken"]
    killed.close()
    assert sorted(race(others, raced)) == ["in use"] * (PROCESSES - 1) + ["taken"]
    said(others, "release")
