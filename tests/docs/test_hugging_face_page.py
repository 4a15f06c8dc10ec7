"""docs/export.md, for Hugging Face: commands and scripts run in their order, and the commands print what it shows."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import tests.hugging_face  # noqa: F401  # offline
from tests.e2e import jobs
from tests.forked import run_script
from torchtitan_lite.cli.app import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "export.md"
EXPORT = re.compile(r"^    torchtitan-lite (export .*)\n\n((?:    (?:note:|Exported|to|with) .*\n)+)", re.MULTILINE)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21 reads it
]


@pytest.mark.slow  # trains three models, and imports transformers in two processes
def test_the_page_runs_and_shows_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text()
    loads_model, loop, loads_adapter = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    jobs.run(tmp_path / "outputs", "--training.steps=2")
    (tmp_path / "gpt2_loop.py").write_text(loop)
    monkeypatch.chdir(tmp_path)
    for script, arguments in ((tmp_path / "gpt2_loop.py", []), (ROOT / "docs" / "examples" / "peft_loop.py", ["2"])):
        process = run_script(script, arguments, tmp_path / "log", dict(os.environ), tmp_path)
        assert process.wait(120) == 0, (tmp_path / "log").read_text()

    commands = EXPORT.findall(text)
    assert [command.split()[1] for command, _ in commands] == ["outputs", "gpt2", "outputs_peft"]
    for command, shown in commands:
        assert main(shlex.split(command)) == 0
        out, err = capsys.readouterr()
        assert without_steps(err + out) == without_steps(re.sub("^    ", "", shown, flags=re.MULTILINE))

    namespace: dict[str, Any] = {}
    exec(loads_model, namespace)
    assert namespace["model"].num_parameters() == 804_480
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained("gpt2_out").config.model_type == "gpt2"
    example = (ROOT / "docs" / "examples" / "peft_loop.py").read_text()
    base = example[example.index("torch.manual_seed") : example.index("model = get_peft_model")]
    exec(f"import torch\nfrom transformers import *\n{base}\n{loads_adapter}", namespace)
    assert "lora" in "".join(name for name, _ in namespace["model"].named_parameters())


def without_steps(text: str) -> str:
    return re.sub(r"step-\d+", "step-N", text)
