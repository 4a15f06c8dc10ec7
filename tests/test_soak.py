"""The soak: its model of the steps that must be there, its draws, and what it finds."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.soak import summed
from scripts.soaking.drawn import draw
from scripts.soaking.expected import Expected, Rules

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "measured" / "soak.jsonl"
PORTION_SECONDS = 300


@pytest.fixture
def expected(tmp_path: Path) -> Expected:
    return Expected(tmp_path)


def commit(expected: Expected, *steps: int, rules: Rules = Rules()) -> None:  # noqa: B008  # A frozen value.
    for step in steps:
        folder = expected.root / f"step-{step}"
        folder.mkdir()
        (folder / "manifest.json").write_text(f"{step}")
        expected.acknowledged(step, rules, {each: float(each) for each in steps})


def remove(expected: Expected, step: int) -> None:
    (expected.root / f"step-{step}" / "manifest.json").unlink()
    (expected.root / f"step-{step}").rmdir()


def test_a_step_may_go_only_if_a_rule_did_not_keep_it(expected: Expected) -> None:
    commit(expected, 3, 6, 9, 12, rules=Rules(latest=2))
    remove(expected, 3)
    assert expected.look() == []
    remove(expected, 9)
    assert expected.look() == ["step 9 was acknowledged, and is gone"]


def test_a_step_that_an_injection_took_is_not_missed_and_another_one_is(expected: Expected) -> None:
    commit(expected, 3, 6, 9)
    expected.took(9)
    remove(expected, 9)
    assert (expected.look(), expected.least) == ([], 6)
    remove(expected, 3)
    assert expected.look() == ["step 3 was acknowledged, and is gone"]


def test_one_byte_that_changed_is_found_unless_an_injection_changed_it(expected: Expected) -> None:
    commit(expected, 3, 6)
    for step in (3, 6):
        (expected.root / f"step-{step}" / "manifest.json").write_text("other")
    expected.damaged(6)
    assert expected.look() == ["step 3 has other bytes than when it was acknowledged, in manifest.json"]
    assert expected.least == 3


def test_a_step_without_an_acknowledgement_counts_from_when_it_is_seen(expected: Expected) -> None:
    commit(expected, 3)
    (expected.root / "step-6").mkdir()
    assert (expected.look(), expected.least) == ([], 6)
    (expected.root / "step-6").rmdir()
    assert expected.look() == ["step 6 was acknowledged, and is gone"]


def test_the_model_keeps_what_the_rules_say() -> None:
    losses = {10: 5.0, 20: 1.0, 30: 4.0, 40: 3.0, 50: 6.0}
    assert Rules().kept(losses) == {10, 20, 30, 40, 50}
    assert Rules(latest=2).kept(losses) == {40, 50}
    assert Rules(every=20).kept(losses) == {20, 40, 50}
    assert Rules(best=2).kept(losses) == {20, 40, 50}
    assert Rules(latest=9, every=7, best=1).kept(losses) == {10, 20, 30, 40, 50}


def test_equal_seeds_draw_equal_lives() -> None:
    seeds = [f"{random.Random(0).random()}:{number}" for number in range(50)]
    lives = [draw(seed) for seed in seeds]
    assert lives == [draw(seed) for seed in seeds]
    assert len({repr(life) for life in lives}) == 50


def test_records_add_up_to_what_the_page_says() -> None:
    records = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    text = summed(records)
    assert RECORDS.with_suffix(".txt").read_text().endswith(f"{text}\n")
    assert "\n".join(text.splitlines()[:2]) in (ROOT / "docs" / "proof.md").read_text()
    assert not any(record["lost"] or record["wrong"] or record["leaked"] for record in records)


@pytest.mark.exhaustive
def test_a_soak_with_a_fresh_seed_loses_nothing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    ended = soak(tmp_path, "--seconds", str(PORTION_SECONDS), "--seed", str(pytestconfig.getoption("--seed")))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "defect, says", [("loss", "was acknowledged, and is gone"), ("bit", "another state"), ("leak", "descriptors")]
)
def test_a_soak_finds_a_defect_that_was_planted(defect: str, says: str, tmp_path: Path) -> None:
    ended = soak(tmp_path, "--seconds", "120", "--seed", "2", "--lives", "1", "--plant", defect)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert says in ended.stdout


def soak(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "soak.py"), "--folder", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PORTION_SECONDS * 3)
