"""The page: the numbers are those of the files, and it is one file that needs nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.cli.command import ROOT, command
from tests.report.histories import BEGUN, CONFIG, copy_of, killed_and_resumed, long_run, metric, saved, write_lines
from torchtitan_lite.report.curves import LOSS_HEIGHT, step_scale
from torchtitan_lite.report.page import render_page
from torchtitan_lite.report.run import read_run
from torchtitan_lite.report.scales import nice_scale

VOID = {"meta", "link", "br"}


class Checked(HTMLParser):
    """Parse a page; keep the values in it, and refuse elements that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.values: dict[str, list[float]] = {}
        self.links: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "action")]
        if tag == "data":
            self.values.setdefault(given.get("class") or "", []).append(float(given["value"] or ""))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> at {self.getpos()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_and_resumed(tmp_path_factory.mktemp("runs") / "resumed")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return render_page([read_run(str(folder))])


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_numbers_are_those_of_the_files_in_full(folder: Path, page: str) -> None:
    values = Checked(page).values
    events = [event for event in lines_of(folder / "events.jsonl") if event["event"] == "committed"]
    last = lines_of(folder / "metrics.jsonl")[-1]
    assert values["step"] == [last["step"]]
    assert values["loss"] == [last["loss_metrics/global_avg_loss"]]
    assert values["tokens-a-second"] == [last["throughput(tps)"]]
    assert values["bytes"] == [event["bytes"] for event in events]
    assert values["seconds"] == [event["seconds"] for event in events]
    assert values["blocked"] == [event["stall_seconds"] for event in events]
    assert values["starts"] == [3]
    assert page.count("slowest: rank 1, 0.100 s") == 5, "of a save of 0.2 s"
    assert values["blocked-by-saves"] == pytest.approx([sum(event["stall_seconds"] for event in events)])
    assert (values["kept"], values["purged"], values["quarantined"]) == ([5], [1], [1])


def test_the_curve_goes_through_the_logged_losses(folder: Path) -> None:
    run = read_run(str(folder))
    (path,) = re.findall(r'<path d="([^"]+)" class="line run0"', render_page([run]))
    points = [tuple(map(float, pair.split())) for pair in re.findall(r"[ML]([-\d.]+ [-\d.]+)", path)]
    x, y = step_scale([run]), nice_scale(min(run.logged.loss), max(run.logged.loss))
    steps = [x.low + (x.high - x.low) * left / 1000 for left, _ in points]
    losses = [y.low + (y.high - y.low) * (1 - top / LOSS_HEIGHT) for _, top in points]
    assert steps == pytest.approx(list(run.logged.steps), abs=0.01)
    assert losses == pytest.approx(list(run.logged.loss), abs=(y.high - y.low) / LOSS_HEIGHT / 10)


def test_marks_are_at_the_steps_of_the_resumes(page: str) -> None:
    assert "Start 2 resumed from step 30" in page
    assert "Start 3 resumed from step 45" in page
    assert 'x1="50%" x2="50%"' in page, "step 30 of 60"


def test_the_page_needs_no_network_and_has_no_script(page: str) -> None:
    assert Checked(page).links == ["data:,"]
    assert "<script" not in page
    assert not re.search(r"url\(|@import|https?://", page)


def test_nothing_of_the_environment_is_in_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a-secret-of-this-shell")
    assert command("report", folder, tmp_path / "r.html").code == 0
    assert "a-secret-of-this-shell" not in (tmp_path / "r.html").read_text()


def test_words_of_the_files_are_text_and_not_markup(tmp_path: Path) -> None:
    run = tmp_path / "<b>run"
    config = CONFIG | {"job": {"description": "<script>alert(1)</script>"}}
    events = [*saved(5, BEGUN)[:1], {"event": "save_failed", "step": 5, "time": BEGUN, "reason": '"><script>x'}]
    write_lines(run / "events.jsonl", events)
    (run / "config.json").write_text(json.dumps(config))
    page = render_page([read_run(str(run))])
    Checked(page)
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page


def test_a_run_with_a_single_file_has_a_page(tmp_path: Path) -> None:
    write_lines(tmp_path / "m" / "metrics.jsonl", [metric(1)])
    write_lines(tmp_path / "e" / "events.jsonl", saved(5, BEGUN))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text(json.dumps(CONFIG))
    for name in ("m", "e", "c"):
        Checked(render_page([read_run(str(tmp_path / name))]))


def test_two_runs_are_next_to_each_other(folder: Path, tmp_path: Path) -> None:
    other = copy_of(folder, tmp_path / "other")
    (other / "config.json").write_text(json.dumps(CONFIG | {"optimizer": {"lr": 1e-3}}))
    ended = command("report", folder, tmp_path / "two.html", "--compare-with", other, "--json")
    assert [run["status"] for run in ended.json["runs"]] == ["finished", "finished"]
    page = (tmp_path / "two.html").read_text()
    values = Checked(page).values
    assert values["step"] == [60, 60]
    assert page.count('class="line run1"') >= 1
    differences = re.search(r'<table class="differences">.*?</table>', page, re.DOTALL)
    assert differences is not None and "optimizer.lr" in differences[0] and "0.001" in differences[0]


def test_a_thousand_ranks_are_a_grid(folder: Path) -> None:
    from torchtitan_lite.report.saved_steps import shard_map

    for num_ranks, num_cells in ((1000, 1000), (5000, 1667)):
        sizes = {f"__{rank}_0.distcp": 1000 + rank for rank in range(num_ranks)}
        shards = shard_map(1, sizes, {})
        assert shards is not None
        run = dataclasses.replace(read_run(str(folder)), shards=shards)
        assert render_page([run]).count('class="cell"') == num_cells


def test_the_command_says_what_it_wrote_and_refuses_what_it_cannot(folder: Path, tmp_path: Path) -> None:
    ended = command("report", folder, tmp_path / "r.html")
    assert ended.code == 0
    assert re.fullmatch(rf"{tmp_path}/r\.html: [\d.]+ KiB, 60 logged steps\n", ended.out)
    assert command("report", tmp_path / "absent", tmp_path / "x.html").code == 1
    assert command("report", folder, tmp_path / "x.txt").err.startswith("error: OUT")
    assert command("report", folder, tmp_path / "no" / "x.html").code == 2


def test_without_jinja2_the_error_names_the_extra(folder: Path) -> None:
    script = (
        "import sys; sys.modules['jinja2'] = None\n"
        "from torchtitan_lite.cli.app import main\n"
        f"code = main(['report', {str(folder)!r}, '/dev/null.html'])\n"
        f"code = main(['report', {str(folder)!r}, {str(folder / 'r.html')!r}])\n"
        "sys.exit(code + 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'torchtitan-lite[report]'" in done.stderr


@pytest.mark.exhaustive
def test_a_million_steps_are_a_small_page_that_still_shows_the_spike(tmp_path: Path) -> None:
    folder = long_run(tmp_path / "long", 1_000_000, save_every=1000)
    begun = time.process_time()
    page = render_page([read_run(str(folder))])
    print(f"{time.process_time() - begun:.1f} s of CPU, {len(page.encode()) / 1e6:.2f} MB")
    assert len(page.encode()) < 3_000_000
    assert "2.0000 to 99.0000" in page or "to 99.0000" in page
    Checked(page)


@pytest.mark.parametrize(("nbytes", "seconds"), [(10**30, 1e-300), (10**30, 0.2), (10_000_000, 0), (-5, 0.2)])
def test_a_save_with_impossible_figures_is_left_out_by_name(
    folder: Path, tmp_path: Path, nbytes: int, seconds: float
) -> None:
    copy = copy_of(folder, tmp_path / "copy")
    with (copy / "events.jsonl").open("a") as events:
        for event in saved(55, BEGUN + 204, nbytes=nbytes, seconds=seconds):
            events.write(json.dumps(event) + "\n")
    text = render_page([read_run(str(copy))])
    assert "Left out, because no disk has that bandwidth: step 55." in text
    assert "best: 100 MB/s, step 60" in text
    Checked(text)


def test_a_run_with_impossible_figures_only_has_a_page_that_says_so(tmp_path: Path) -> None:
    events = [event for step in range(1, 12) for event in saved(step, BEGUN + step, nbytes=10**30, seconds=1e-300)]
    write_lines(tmp_path / "events.jsonl", events)
    text = render_page([read_run(str(tmp_path))])
    assert "No save is recorded." not in text
    assert "no disk has that bandwidth: steps 1, 2, 3, 4, 5, 6, 7, 8 and 3 more." in text
