"""Retention as a language: each rule, their union, and free space."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_lite.config.job_config import Checkpoint
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.store.manifest import CheckpointInfo, CheckpointKind
from torchtitan_lite.store.retention import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepFor,
    KeepLatest,
    RetentionPolicy,
    build_retention,
    judge_checkpoints,
)

HOUR = 3600.0
NOW = 100 * HOUR


def info(step: int, loss: float | None = None, *, age_hours: float = 0.0, **more: Any) -> CheckpointInfo:
    metrics = {} if loss is None else {"loss": loss}
    given: dict[str, Any] = {"kind": CheckpointKind.FULL, "nbytes": 10, "metrics": metrics} | more
    return CheckpointInfo(step=step, path=Path(f"step-{step}"), created_at=NOW - age_hours * HOUR, **given)


def weights(step: int) -> CheckpointInfo:
    return info(step, kind=CheckpointKind.WEIGHTS_ONLY)


def infos(*steps: int) -> list[CheckpointInfo]:
    return [info(step) for step in steps]


def losses(**by_step: float | None) -> list[CheckpointInfo]:
    return [info(int(name[1:]), loss) for name, loss in by_step.items()]


@dataclass(frozen=True)
class Row:
    """`stays`: by step, the reasons for which it stays; a step that goes is absent."""

    name: str
    policy: RetentionPolicy
    there: list[CheckpointInfo]
    stays: dict[int, str]
    more: dict[str, Any] = field(default_factory=dict)


LATEST = "latest latest_without_nan"
TABLE = [
    Row("no rule", KeepAll(), infos(1, 2), {1: "no_rule", 2: f"no_rule {LATEST}"}),
    Row("nothing there", KeepLatest(1), [], {}),
    Row("latest", KeepLatest(2), infos(1, 2, 3), {2: "keep_latest_k", 3: f"keep_latest_k {LATEST}"}),
    Row(
        "every",
        KeepEvery(10),
        infos(0, 5, 10, 15),
        {0: "keep_every_n_steps", 10: "keep_every_n_steps", 15: LATEST},
    ),
    Row(
        "best, lowest",
        KeepBest(2, "loss"),
        losses(s1=3.0, s2=1.0, s3=2.0, s4=4.0),
        {2: "keep_best_k", 3: "keep_best_k", 4: LATEST},
    ),
    Row(
        "best, highest",
        KeepBest(1, "loss", highest=True),
        losses(s1=3.0, s2=1.0, s3=2.0),
        {1: "keep_best_k", 3: LATEST},
    ),
    Row(
        "of equally good ones the later",
        KeepBest(1, "loss"),
        losses(s1=1.0, s2=1.0, s3=9.0),
        {2: "keep_best_k", 3: LATEST},
    ),
    Row(
        "best of equally high ones is the later",
        KeepBest(1, "loss", highest=True),
        losses(s1=1.0, s2=1.0, s3=0.0),
        {2: "keep_best_k", 3: LATEST},
    ),
    Row(
        "what has no metric is never best, and stays while nothing else judges it",
        KeepBest(1, "loss"),
        losses(s1=None, s2=1.0, s3=2.0, s4=3.0),
        {1: "no_rule", 2: "keep_best_k", 4: LATEST},
    ),
    Row(
        "what has no metric goes by another rule",
        KeepAny((KeepBest(1, "loss"), KeepLatest(1))),
        losses(s1=None, s2=1.0, s3=None, s4=3.0),
        {2: "keep_best_k", 4: f"keep_latest_k {LATEST}"},
    ),
    Row(
        "another metric",
        KeepBest(1, "val"),
        [info(1, metrics={"loss": 0.0, "val": 2.0}), info(2, metrics={"loss": 9.0, "val": 1.0}), info(3, 0.0)],
        {2: "keep_best_k", 3: f"no_rule {LATEST}"},
    ),
    Row(
        "what has NaN in its weights, or was saved while ranks differed, is never best",
        KeepBest(1, "loss"),
        [info(1, 2.0), info(2, 1.0, has_nan=True), info(3, 3.0), info(4, 0.5, ranks_differ=True)],
        {1: "keep_best_k", 3: "latest_of_equal_ranks", 4: LATEST},
    ),
    Row(
        "time to live",
        KeepFor(2),
        [info(1, age_hours=3), info(2, age_hours=2), info(3, age_hours=1), info(4, age_hours=-5)],
        {2: "keep_for_hours", 3: "keep_for_hours", 4: f"keep_for_hours {LATEST}"},
    ),
    Row("all are older than the time to live", KeepFor(2), [info(1, age_hours=9), info(2, age_hours=9)], {2: LATEST}),
    Row(
        "a union",
        KeepAny((KeepLatest(1), KeepEvery(4), KeepBest(1, "loss"), KeepFor(0.5))),
        [
            info(3, 1.0, age_hours=9),
            info(4, 2.0, age_hours=9),
            info(5, 3.0, age_hours=0.1),
            info(6, 4.0),
            info(2, 9.0, age_hours=9),
        ],
        {
            3: "keep_best_k",
            4: "keep_every_n_steps",
            5: "keep_for_hours",
            6: f"keep_latest_k keep_for_hours {LATEST}",
        },
    ),
    Row("a pin", KeepLatest(1), infos(1, 2, 3), {1: "pinned", 3: f"keep_latest_k {LATEST}"}, {"pinned": {1, 7}}),
    Row(
        "weights only",
        KeepEvery(10),
        [weights(1), info(2), info(3), weights(4)],
        {1: "weights_only", 3: LATEST, 4: "weights_only"},
    ),
    Row(
        "best and weights only",
        KeepBest(1, "loss"),
        [weights(1), info(2, 1.0)],
        {1: "weights_only", 2: f"keep_best_k {LATEST}"},
    ),
    Row(
        "known good",
        KeepFor(1),
        [info(step, age_hours=5) for step in (1, 2, 3)],
        {2: "last_good", 3: LATEST},
        {"known_good": {1, 2}},
    ),
    Row("in use", KeepEvery(10), infos(1, 2, 3), {1: "protected", 3: LATEST}, {"protected": {1}}),
    Row(
        "the latest without NaN",
        KeepEvery(10),
        [info(1), info(2), info(3, has_nan=True), info(4, has_nan=True)],
        {2: "latest_without_nan", 4: "latest"},
    ),
    Row(
        "the latest whose ranks were equal",
        KeepEvery(10),
        [info(1), info(2), info(3, has_nan=True), info(4, ranks_differ=True), info(5, ranks_differ=True)],
        {2: "latest_of_equal_ranks", 5: LATEST},
    ),
    Row(
        "a damaged one counts as absent",
        KeepBest(1, "loss"),
        losses(s1=2.0, s2=1.0, s3=3.0, s4=4.0),
        {1: "keep_best_k", 2: "damaged", 4: LATEST},
        {"is_sound": lambda found: found.step != 2},
    ),
    Row(
        "too little space takes the oldest that only keep_latest_k keeps",
        KeepAny((KeepLatest(4), KeepEvery(2))),
        infos(2, 3, 4, 5),
        {2: "keep_latest_k keep_every_n_steps", 4: "keep_latest_k keep_every_n_steps", 5: f"keep_latest_k {LATEST}"},
        {"missing_bytes": 25},
    ),
    Row(
        "too little space with no rule",
        KeepAll(),
        infos(1, 2, 3, 4),
        {3: "no_rule", 4: f"no_rule {LATEST}"},
        {"missing_bytes": 11},
    ),
    Row(
        "what goes by a rule counts for the space",
        KeepLatest(2),
        infos(1, 2, 3, 4),
        {3: "keep_latest_k", 4: f"keep_latest_k {LATEST}"},
        {"missing_bytes": 20},
    ),
    Row(
        "too little space takes neither pinned nor protected ones nor weights",
        KeepAll(),
        [info(1), weights(2), *infos(3, 4, 5)],
        {1: "no_rule pinned", 2: "weights_only", 3: "no_rule last_good", 5: f"no_rule {LATEST}"},
        {"missing_bytes": 10**9, "pinned": {1}, "known_good": {3}},
    ),
    Row(
        "too little space takes no damaged one, which frees nothing that counts",
        KeepAll(),
        infos(1, 2, 3),
        {1: "damaged", 3: f"no_rule {LATEST}"},
        {"missing_bytes": 5, "is_sound": lambda found: found.step != 1},
    ),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_rule_keeps_what_the_table_says_and_is_named(row: Row) -> None:
    verdicts = judge_checkpoints(row.policy, row.there, now=NOW, **row.more)
    assert [verdict.info.step for verdict in verdicts] == sorted(found.step for found in row.there)
    stays = {verdict.info.step: " ".join(verdict.kept_by) for verdict in verdicts if not verdict.goes}
    assert stays == row.stays


def test_what_goes_for_space_is_marked() -> None:
    verdicts = judge_checkpoints(KeepLatest(3), infos(1, 2, 3, 4), missing_bytes=15)
    assert [(each.goes, each.for_space) for each in verdicts] == [
        (True, False),
        (True, True),
        (False, False),
        (False, False),
    ]


RULES = {
    "latest": st.integers(1, 4).map(KeepLatest),
    "every": st.integers(1, 9).map(KeepEvery),
    "for": st.floats(0.0, 9.0).map(KeepFor),
    "best": st.builds(KeepBest, st.integers(1, 3), st.just("loss"), st.booleans()),
}
LOSSES = st.none() | st.sampled_from([0.5, 1.0, 1.5]) | st.floats(-9, 9)
INFOS = st.lists(
    st.builds(
        lambda step, loss, age, kind, has_nan: info(step, loss, age_hours=age, kind=kind, has_nan=has_nan),
        st.integers(0, 40),
        LOSSES,
        st.floats(-1, 10),
        st.sampled_from(CheckpointKind),
        st.booleans(),
    ),
    unique_by=lambda found: found.step,
    max_size=8,
)
POLICIES = st.lists(st.one_of(*RULES.values()), max_size=4).map(lambda rules: KeepAny(tuple(rules)))


def kept(policy: RetentionPolicy, there: list[CheckpointInfo], **more: Any) -> set[int]:
    return {verdict.info.step for verdict in judge_checkpoints(policy, there, now=NOW, **more) if not verdict.goes}


@given(INFOS, st.one_of(RULES["latest"], RULES["every"], RULES["for"]), POLICIES, st.sets(st.integers(0, 40)))
def test_more_rules_and_more_pins_never_keep_fewer(
    there: list[CheckpointInfo], first: RetentionPolicy, others: KeepAny, pinned: set[int]
) -> None:
    kept_by_one = kept(first, there)
    assert kept_by_one <= kept(KeepAny((first, others)), there)
    assert kept(others, there) <= kept(others, there, pinned=pinned)
    assert {found.step for found in there} & pinned <= kept(others, there, pinned=pinned)


@given(INFOS, POLICIES, st.integers(0, 200), st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
def test_the_latest_and_the_weights_stay_whatever_the_rules_and_the_disk(
    there: list[CheckpointInfo], policy: KeepAny, missing_bytes: int, sound: set[int], good: set[int]
) -> None:
    found = kept(policy, there, missing_bytes=missing_bytes, known_good=good, is_sound=lambda each: each.step in sound)
    full = sorted(each.step for each in there if each.kind is CheckpointKind.FULL)
    whole = [step for step in full if step in sound]
    assert {each.step for each in there} - set(full) <= found
    assert set(full) - set(whole) <= found
    assert set(whole[-1:]) <= found
    finite = [each.step for each in there if each.step in whole and not each.has_nan]
    assert not finite or max(finite) in found
    assert not good.intersection(finite) or max(good.intersection(finite)) in found


@given(INFOS, POLICIES, st.integers(0, 200))
def test_space_takes_the_oldest_of_what_it_may_and_no_more_than_it_needs(
    there: list[CheckpointInfo], policy: KeepAny, missing_bytes: int
) -> None:
    verdicts = judge_checkpoints(policy, there, now=NOW, missing_bytes=missing_bytes)
    before = {each.info.step: each for each in judge_checkpoints(policy, there, now=NOW)}
    taken = [each.info.step for each in verdicts if each.for_space]
    may_go = [step for step, each in before.items() if each.kept_by and {*each.kept_by} <= {"keep_latest_k", "no_rule"}]
    assert taken == may_go[: len(taken)]
    freed = 10 * sum(each.goes for each in verdicts)
    assert freed >= missing_bytes or taken == may_go
    assert not taken or freed - 10 < missing_bytes


@pytest.mark.parametrize(
    ("keys", "policy"),
    [
        ({}, KeepAll()),
        ({"keep_best_metric": "max:val"}, KeepAll()),
        ({"keep_latest_k": 3}, KeepLatest(3)),
        ({"keep_every_n_steps": 100}, KeepEvery(100)),
        ({"keep_best_k": 2, "keep_best_metric": "max:val"}, KeepBest(2, "val", highest=True)),
        ({"keep_best_k": 2, "keep_best_metric": "min:val"}, KeepBest(2, "val")),
        ({"keep_best_k": 2, "keep_best_metric": "min:max:val"}, KeepBest(2, "max:val")),
        ({"keep_best_k": 2, "keep_best_metric": "val:max"}, KeepBest(2, "val:max")),
        ({"keep_for_hours": 1.5}, KeepFor(1.5)),
        ({"keep_latest_k": 1, "keep_best_k": 2}, KeepAny((KeepLatest(1), KeepBest(2, "loss")))),
    ],
    ids=str,
)
def test_the_keys_become_rules(keys: dict[str, Any], policy: RetentionPolicy) -> None:
    assert build_retention(Checkpoint(**keys)) == policy


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("keep_every_n_steps", -1, "expected at least 0, found -1"),
        ("keep_best_k", -2, "expected at least 0, found -2"),
        ("keep_for_hours", -0.5, "expected a finite number of at least 0, found -0.5"),
        ("keep_for_hours", float("nan"), "expected a finite number of at least 0, found nan"),
        ("min_free_disk_gb", float("inf"), "expected a finite number of at least 0, found inf"),
        ("keep_best_metric", "", "expected the name of a metric, found an empty string"),
        ("keep_best_metric", "max:", "expected the name of a metric, found an empty string"),
        ("digest_tensors", ("save", "always"), "expected one of save, load, staging, ranks, found 'always'"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_key(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^checkpoint.{key}: {message}"):
        Checkpoint(**{key: value})


@pytest.mark.parametrize("policy", [KeepLatest, KeepEvery, lambda count: KeepBest(count, "loss")])
def test_a_rule_of_none_is_refused(policy: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        policy(0)


def test_infos_with_metrics_are_compared_and_hashed() -> None:
    assert len({info(1, 2.0), info(1, 2.0), dataclasses.replace(info(1, 2.0), metrics={})}) == 2
    assert all(a == b for a, b in itertools.pairwise([info(1, 2.0), info(1, 2.0)]))
