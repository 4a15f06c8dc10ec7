"""The text file for Prometheus: complete at any time, in its format, with the figures of the ledger."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.logged import logged_warnings
from torchtitan_lite.accounts import Accounts, Start
from torchtitan_lite.config.job_config import Metrics
from torchtitan_lite.errors import ConfigError
from torchtitan_lite.metrics.logger import PrometheusFile

ACCOUNTS = Accounts(
    (
        Start("a", 100.0, 200.0, {"productive": 60.0, "starting": 40.0}, loaded_step=0, last_step=12, durable_step=10),
        Start("b", 220.0, 300.0, {"productive": 80.0}, loaded_step=10, last_step=20, durable_step=15),
    )
)
LINE = re.compile(r'torchtitan_lite_([a-z_]+)\{run="((?:[^"\\]|\\.)*)"(?:,part="([a-z_]+)")?\} (\S+)')


def _written(path: Path) -> dict[str, float]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    assert all(found), lines
    return {f"{match[1]}{' ' + match[3] if match[3] else ''}": float(match[4]) for match in found if match}


def test_the_file_has_the_figures_of_the_ledger_and_of_the_last_logged_step(tmp_path: Path) -> None:
    file = PrometheusFile(tmp_path / "textfiles" / "run.prom", 'a "run"\\')
    file.logged = {"loss_metrics/global_avg_loss": float("nan"), "throughput(tps)": 512.5}
    file.write(ACCOUNTS, (5, 33.25), is_up=True)
    figures = _written(tmp_path / "textfiles" / "run.prom")
    assert figures["time_seconds productive"] == 140 and figures["time_seconds down"] == 20
    assert (figures["goodput_ratio"], figures["redone_steps"], figures["starts"]) == (0.7, 2, 2)
    assert (figures["step"], figures["durable_step"], figures["at_risk_steps"], figures["at_risk_seconds"]) == (
        *(20, 15, 5),
        33.25,
    )
    assert figures["tokens_per_second"] == 512.5 and figures["loss"] != figures["loss"]
    assert (figures["up"], figures["beat_timestamp_seconds"]) == (1, 300)
    assert [path.name for path in (tmp_path / "textfiles").iterdir()] == ["run.prom"]


def test_each_figure_has_its_help_and_type_once(tmp_path: Path) -> None:
    PrometheusFile(tmp_path / "run.prom", "run").write(ACCOUNTS, (0, 0.0), is_up=False)
    text = (tmp_path / "run.prom").read_text()
    names = re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE)
    assert names == re.findall(r"^# HELP (\S+) .+\.$", text, re.MULTILINE) and len(set(names)) == len(names) == 10
    assert text.endswith("\n") and "torchtitan_lite_up" in text


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    file = PrometheusFile(tmp_path / "file" / "run.prom", "run")
    with logged_warnings() as warnings:
        file.write(ACCOUNTS, (0, 0.0), is_up=True)
        file.write(ACCOUNTS, (0, 0.0), is_up=True)
    assert len(warnings) == 1 and warnings[0].endswith("Training continues")


def test_a_name_that_the_collector_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'expected a name that ends with "\.prom"'):
        Metrics(prometheus_file="run.txt")


def test_a_run_in_a_folder_whose_name_is_not_utf_8_has_a_file(tmp_path: Path) -> None:
    PrometheusFile(tmp_path / "run.prom", os.fsdecode(b"/runs/\xff")).write(ACCOUNTS, (0, 0.0), is_up=True)
    assert 'run="/runs/?"' in (tmp_path / "run.prom").read_text(encoding="utf-8")
