"""The command line and the TOML file become one valid `JobConfig`, or one message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_lite.config.job_config import JobConfig
from torchtitan_lite.config.keys import KEYS
from torchtitan_lite.config.manager import config_json, parse_config, parse_config_or_exit
from torchtitan_lite.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def toml(tmp_path):
    """Return a function that writes a TOML file and returns the arguments that name it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "some.toml"
        path.write_text(text)
        return ["--job.config_file", str(path)]

    return write


def test_no_arguments_at_all_give_the_defaults():
    assert parse_config([]) == JobConfig()
    assert parse_config([]).training.steps == 10000


def test_an_empty_toml_gives_the_defaults(toml):
    assert parse_config(toml("")).training == JobConfig().training


def test_the_command_line_wins_over_the_toml_and_the_toml_over_the_default(toml):
    file = toml("[training]\nsteps = 7\nseq_len = 64\n")
    config = parse_config([*file, "--training.steps", "400"])
    assert (config.training.steps, config.training.seq_len, config.training.batch_size) == (400, 64, 8)


def test_the_command_line_wins_wherever_the_file_is_named(toml):
    assert parse_config(["--training.steps=400", *toml("[training]\nsteps = 7\n")]).training.steps == 400


@pytest.mark.parametrize(
    "argv",
    [
        ["--checkpoint.load_step", "5"],
        ["--checkpoint.load_step=5"],
        ["--checkpoint.load-step", "5"],
        ["--checkpoint.load-step=5"],
        ["--checkpoint.load_step=3", "--checkpoint.load-step=5"],
        ["--checkpoint.load-step=3", "--checkpoint.load_step=5"],
    ],
)
def test_a_value_is_the_next_word_or_behind_an_equals_sign_with_underscores_or_hyphens(argv):
    assert parse_config(argv).checkpoint.load_step == 5


@pytest.mark.parametrize("argv", [["--checkpoint.load_step", "-1"], ["--checkpoint.load_step=-1"]])
def test_a_value_may_begin_with_a_hyphen(argv):
    assert parse_config(["--checkpoint.load_step=3", *argv]).checkpoint.load_step == -1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--checkpoint.enable_checkpoint", True),
        ("--checkpoint.enable", True),
        ("--checkpoint.enable_checkpoint=true", True),
        ("--checkpoint.enable_checkpoint True", True),
        ("--checkpoint.enable_checkpoint false", False),
        ("--checkpoint.enable --checkpoint.no_enable_checkpoint", False),
        ("--checkpoint.enable-checkpoint --checkpoint.no-enable-checkpoint", False),
        ("--checkpoint.enable_checkpoint --checkpoint.no_enable", False),
        ("--checkpoint.no_enable --checkpoint.enable_checkpoint", True),
    ],
)
def test_a_switch_is_given_by_its_name_or_by_no_and_its_name(words, expected):
    assert parse_config(words.split()).checkpoint.enable_checkpoint is expected


@pytest.mark.parametrize("words", ["optimizer lr_scheduler", "optimizer,lr_scheduler", "optimizer, lr_scheduler"])
def test_a_list_is_separated_by_commas_or_spaces_quoted_or_not(words):
    expected = ("optimizer", "lr_scheduler")
    key = "--checkpoint.exclude_from_loading"
    assert parse_config([key, words]).checkpoint.exclude_from_loading == expected
    assert parse_config([key, *words.split(), "--training.steps=5"]).checkpoint.exclude_from_loading == expected
    assert parse_config([f"{key}={words}"]).checkpoint.exclude_from_loading == expected


def test_a_list_in_toml_is_a_list_and_may_be_emptied_again(toml):
    file = toml('[checkpoint]\nexclude_from_loading = ["dataloader", "rng"]\npreemption_signals = []\n')
    checkpoint = parse_config(file).checkpoint
    assert checkpoint.exclude_from_loading == ("dataloader", "rng")
    assert checkpoint.preemption_signals == ()
    assert parse_config([*file, "--checkpoint.exclude_from_loading="]).checkpoint.exclude_from_loading == ()


def test_choices_are_found_whatever_their_case(toml):
    assert parse_config(["--checkpoint.async_mode", "ASYNC_With_Pinned_Mem"]).checkpoint.async_mode == (
        "async_with_pinned_mem"
    )
    assert parse_config(toml('[checkpoint]\nasync_mode = "Async"\n')).checkpoint.async_mode == "async"
    assert parse_config(["--optimizer.name=adam"]).optimizer.name == "Adam"


def test_toml_values_keep_their_kind(toml):
    config = parse_config(
        toml(
            "[optimizer]\nlr = 1\neps = 1e-8\n[training]\nseed = 0\n[lr_scheduler]\ndecay_ratio = 0.5\n"
            '[job]\ndescription = "--- a = b, c\\n\\"quoted\\" \\u00e9"\ndump_folder = ""\n'
        )
    )
    assert config.optimizer.lr == 1.0
    assert config.optimizer.eps == 1e-8
    assert config.training.seed == 0
    assert config.lr_scheduler.decay_ratio == 0.5
    assert config.job.description == '--- a = b, c\n"quoted" é'
    assert config.job.dump_folder == ""


def test_none_unsets_a_key_of_the_toml(toml):
    assert parse_config([*toml("[training]\nseed = 5\n"), "--training.seed", "None"]).training.seed is None


def test_a_key_in_toml_may_be_spelled_with_hyphens_or_dots(toml):
    assert parse_config(toml("lr-scheduler.warmup-steps = 3\n")).lr_scheduler.warmup_steps == 3


def test_a_config_file_is_looked_up_as_given_then_in_train_configs_here_then_next_to_the_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_config(["--job.config_file=llama_debug.toml"]).job.description == "Llama 3 debug training"
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "llama_debug.toml").write_text('job.description = "in the folder"')
    assert parse_config(["--job.config-file", "llama_debug.toml"]).job.description == "in the folder"
    (tmp_path / "llama_debug.toml").write_text('job.description = "as given"')
    assert parse_config(["--job.config_file", "llama_debug.toml"]).job.description == "as given"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('interval = "five"', "checkpoint.interval: expected a whole number, found the string 'five'."),
        ('interval = "5"', "found the string '5' (write it without quotes)"),
        ("interval = 5.0", "checkpoint.interval: expected a whole number, found the number 5.0."),
        ("interval = true", "checkpoint.interval: expected a whole number, found true."),
        ("interval = [5]", "checkpoint.interval: expected a whole number, found [5]."),
        ("enable_checkpoint = 1", "checkpoint.enable_checkpoint: expected true or false, found the number 1."),
        ('enable = "true"', "checkpoint.enable: expected true or false, found the string 'true'"),
        ("folder = 5", "found the number 5 (write it in quotes)"),
        ('exclude_from_loading = "dataloader"', "expected a list of strings, found the string 'dataloader'."),
        ("exclude_from_loading = [1]", "expected a list of strings, found [1]."),
        ("intervall = 5", "checkpoint.intervall is not a key. The nearest is checkpoint.interval;"),
        ('async_mode = "asinc"', "found 'asinc'. Set --checkpoint.async_mode=async."),
        ("interval = {steps = 5}", "checkpoint.interval.steps is not a key."),
        ("interval = 0", "checkpoint.interval: expected at least 1, found 0."),
    ],
)
def test_an_error_in_a_toml_section_is_named_with_its_fix(toml, text, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(toml(f"[checkpoint]\n{text}\n"))
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[chekpoint]\ninterval = 5", "[chekpoint] is not a section. The nearest is [checkpoint]"),
        ("[chekpoint]", "[chekpoint] is not a section. The nearest is [checkpoint]"),
        ("steps = 5", "steps is outside any section"),
        ("[[checkpoint]]\ninterval = 5", "checkpoint is outside any section"),
        ("[checkpoint\n", "some.toml: not valid TOML: "),
        ("[training]\nlr = 5.0", "training.lr is not a key. The nearest is optimizer.lr;"),
        ("[training]\nqwertyuiop = 5.0", "training.qwertyuiop is not a key. None is near;"),
    ],
)
def test_an_error_in_a_toml_file_is_named_with_its_fix(toml, text, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(toml(text))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--checkpoint.intervall 5", "--checkpoint.intervall is not a key. The nearest is checkpoint.interval;"),
        ("--chekpoint.interval 5", "The nearest is checkpoint.interval;"),
        ("--steps 5", "The nearest is training.steps;"),
        ("--checkpoint.enabel", "The nearest is checkpoint.enable;"),
        ("--training.no_steps", "--training.no_steps is not a key."),
        ("--training.steps five", "--training.steps: expected a whole number, found 'five'."),
        ("--training.steps", "--training.steps: expected a whole number, found nothing. Write --training.steps=VALUE."),
        ("--training.steps 5 6", "--training.steps: expected one value, found '5 6'."),
        ("--training.seed soon", "--training.seed: expected a whole number, found 'soon'."),
        ("--training.spike_factor inf", "training.spike_factor: expected a number above 1, or 0, found inf."),
        ("--training.spike_factor 1", "training.spike_factor: expected a number above 1, or 0, found 1.0."),
        ("--training.compile maybe", "--training.compile: expected true or false, found 'maybe'."),
        ("--training.no_compile=1", "--training.no_compile: takes no value, found '1'."),
        ("training.steps=5", "'training.steps=5' comes before any key."),
        ("--checkpoint.async_mode later", "expected one of disabled, async, async_with_pinned_mem, found 'later'."),
        ("--optimizer.name Muon", "found 'Muon'. Set --optimizer.name to one of these."),
        ("--optimizer.name AdmW", "found 'AdmW'. Set --optimizer.name=AdamW."),
    ],
)
def test_an_error_on_the_command_line_is_named_with_its_fix(words, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(words.split())
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--checkpoint.folder=", "checkpoint.folder: expected a folder of its own, found an empty string"),
        ("--checkpoint.interval 0", "checkpoint.interval: expected at least 1, found 0"),
        ("--checkpoint.keep_latest_k -1", "checkpoint.keep_latest_k: expected at least 0, found -1"),
        ("--checkpoint.load_step -2", "checkpoint.load_step: expected at least -1, found -2"),
        ("--checkpoint.exclude_from_loading model", "'model' cannot be left out"),
        ("--checkpoint.exclude_from_loading optimizer", "Add lr_scheduler"),
        ("--checkpoint.interval_type hours", "checkpoint.interval_type: expected one of steps, seconds"),
        ("--checkpoint.export_dtype int8", "checkpoint.export_dtype: expected one of float32, float16, bfloat16"),
        ("--metrics.log_freq 0", "metrics.log_freq: expected at least 1, found 0"),
    ],
)
def test_a_value_against_a_rule_is_refused_in_one_line_with_the_reason(words, expected):
    with pytest.raises(ConfigError) as caught:
        parse_config(words.split())
    assert expected in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_config_file_is_named_with_the_existing_ones():
    with pytest.raises(
        ConfigError,
        match=r"neither nope\.toml nor train_configs/nope\.toml was found.*llama3_8b\.toml.*llama_debug\.toml",
    ):
        parse_config(["--job.config_file", "nope.toml"])


@pytest.mark.parametrize("words", [["--job.config_file", ""], ["--job.config_file="]])
def test_an_empty_name_of_a_config_file_is_said_to_be_empty(words):
    with pytest.raises(ConfigError, match=r"--job\.config_file: expected a file, found an empty value\. Name a file"):
        parse_config(words)


def test_a_config_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "some.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"some\.toml: cannot be read as a text file"):
        parse_config(["--job.config_file", str(tmp_path / "some.toml")])


def test_an_export_dtype_without_a_weights_only_checkpoint_is_a_warning(caplog):
    parse_config(["--checkpoint.export_dtype=bfloat16"])
    assert "checkpoint.export_dtype has no effect without checkpoint.model_weights_only, export_folder" in caplog.text
    caplog.clear()
    parse_config(["--checkpoint.export_dtype=bfloat16", "--checkpoint.model_weights_only"])
    parse_config(["--checkpoint.export_dtype=bfloat16", "--checkpoint.last_save_in_hf"])
    assert caplog.text == ""


def test_wrong_usage_ends_with_2_and_one_message_on_stderr(capsys):
    with pytest.raises(SystemExit) as leaving:
        parse_config_or_exit(["--checkpoint.intervall", "5"])
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "checkpoint.interval;" in err


def test_help_lists_every_key_with_its_doc_string_within_80_columns_and_ends_with_0(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leaving:
        parse_config_or_exit(["--help"])
    assert not leaving.value.code
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 80
    assert [key for key in KEYS if f"--{key}" not in page] == []
    assert "Full checkpoints to keep, counted once durable; 0: all." in page


def test_help_for_a_reader_that_has_seen_enough_ends_without_a_traceback():
    there, gone = os.pipe()
    os.close(there)
    with os.fdopen(gone, "wb") as stdout:
        code = "from torchtitan_lite.config.manager import parse_config_or_exit; parse_config_or_exit(['--help'])"
        ended = subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_the_config_never_imports_torch():
    script = "import sys; from torchtitan_lite.config import manager; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=True)


def test_the_resolved_config_is_json_with_every_key_in_a_stable_order():
    text = config_json(parse_config(["--training.steps=5"]))
    document = json.loads(text)
    assert [f"{section}.{key}" for section, keys in document.items() for key in keys] == list(KEYS)
    assert document["training"]["steps"] == 5
    assert document["training"]["seed"] is None
    assert document["checkpoint"]["exclude_from_loading"] == []
    assert text.endswith("}\n")


@pytest.mark.parametrize("path", sorted(ROOT.glob("train_configs/*.toml")), ids=lambda p: p.name)
def test_every_config_in_train_configs_parses_from_anywhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_config(["--job.config_file", path.name]).checkpoint.enable_checkpoint


@pytest.mark.parametrize("words", ["--checkpoint.at_steps 10,100", "--checkpoint.at-steps=10,100"])
def test_a_list_of_whole_numbers_is_separated_by_commas_or_is_one_in_toml(toml, words):
    assert parse_config(words.split()).checkpoint.at_steps == (10, 100)
    assert parse_config(["--checkpoint.at_steps", "10", "100"]).checkpoint.at_steps == (10, 100)
    assert parse_config(["--checkpoint.at_steps="]).checkpoint.at_steps == ()
    path = toml("[checkpoint]\nat_steps = [10, 100]\n")
    assert parse_config(path).checkpoint.at_steps == (10, 100)
    assert parse_config([*path, *words.replace("10,100", "7").split()]).checkpoint.at_steps == (7,)


@pytest.mark.parametrize(
    ("text", "found"),
    [('["10"]', "['10']"), ("[1.5]", "[1.5]"), ("[true]", "[True]"), ("10", "the number 10")],
)
def test_what_is_no_list_of_whole_numbers_is_named(toml, text, found):
    with pytest.raises(ConfigError) as caught:
        parse_config(toml(f"[checkpoint]\nat_steps = {text}\n"))
    assert f"checkpoint.at_steps: expected a list of whole numbers, found {found}." in str(caught.value)
    with pytest.raises(ConfigError, match=r"expected a list of whole numbers, found '10,soon'\."):
        parse_config(["--checkpoint.at_steps=10,soon"])


def test_a_seed_checkpoint_of_new_weights_does_not_take_the_place_of_an_import():
    words = "--checkpoint.initial_load_in_hf --checkpoint.initial_load_path=x --checkpoint.create_seed_checkpoint"
    with pytest.raises(ConfigError, match=r"checkpoint\.create_seed_checkpoint: it saves new weights as step 0"):
        parse_config(words.split())
