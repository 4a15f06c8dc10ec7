"""Metrics in a manifest: what a reader makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_lite.errors import CheckpointDamaged
from torchtitan_lite.store.known_manifests import checkpoint_info
from torchtitan_lite.store.manifest import CheckpointKind, Manifest, seal


def text_with(extra: str) -> bytes:
    manifest = Manifest(step=1, kind=CheckpointKind.FULL, created_at=0.0, world_size=1, versions={}, files={})
    lines, _, _ = manifest.to_json().partition(b',\n"digest"')
    assert b'"extra": {}' in lines
    return seal(lines.replace(b'"extra": {}', b'"extra": ' + extra.encode()))


@pytest.mark.parametrize(
    ("extra", "metrics"),
    [("{}", {}), ('{"metrics":{}}', {}), ('{"metrics":{"loss":1.5,"a b":-0.0}}', {"loss": 1.5, "a b": -0.0})],
)
def test_metrics_are_those_of_the_manifest(extra: str, metrics: dict[str, Any]) -> None:
    assert checkpoint_info(Path("step-1"), Manifest.parse(text_with(extra))).metrics == metrics


@pytest.mark.parametrize(
    ("seconds", "finding"),
    [
        ("1", "expected float, found int"),
        ("-0.5", "expected seconds, found -0.5"),
        ("1e999", "expected seconds, found inf"),
    ],
)
def test_trained_seconds_that_are_no_finite_float_are_damage(seconds: str, finding: str) -> None:
    assert Manifest.parse(text_with('{"trained_seconds":0.5}')).extra["trained_seconds"] == 0.5
    with pytest.raises(CheckpointDamaged) as damage:
        Manifest.parse(text_with(f'{{"trained_seconds":{seconds}}}'))
    assert f"extra.trained_seconds: {finding}" in damage.value.finding


@pytest.mark.parametrize(
    ("metrics", "finding"),
    [
        ("[1.0]", "extra.metrics: expected dict, found list"),
        ('{"loss":"1"}', "extra.metrics.loss: expected a finite float, found '1'"),
        ('{"loss":1e999}', "extra.metrics.loss: expected a finite float, found inf"),
        ('{"loss":7}', "extra.metrics.loss: expected a finite float, found 7"),
        ('{"loss":true}', "extra.metrics.loss: expected a finite float, found True"),
        ('{"loss":null}', "extra.metrics.loss: expected a finite float, found None"),
        ('{"loss":NaN}', "NaN is not a JSON number"),
        ('{"\\ud800":1.0}', "is not valid text"),
    ],
)
def test_a_metric_that_is_no_finite_float_is_damage_that_names_it(metrics: str, finding: str) -> None:
    with pytest.raises(CheckpointDamaged) as damage:
        Manifest.parse(text_with(f'{{"metrics":{metrics}}}'))
    assert finding in damage.value.finding
