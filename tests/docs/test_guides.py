"""Guides: scripts that frameworks run, and the attention variant, whose diffs apply."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import FRAMEWORKS, blocks
from tests.engine.runs import LIMIT
from tests.ranks import ROOT, launch, spawn_ranks

SCRIPTS = {}  # name: (text, what it prints)
for _block in blocks(FRAMEWORKS):
    if _match := re.match(r"# (\w+\.py): ", _block.text):
        SCRIPTS[_match[1]] = _block.text, _block.output


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, (text, _) in SCRIPTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(script: Path, *arguments: str) -> str:
    """Run a script in one process; return its stdout."""
    process = spawn_ranks(script, *arguments, ranks=0, environment={"HF_HUB_OFFLINE": "1"})
    try:
        code = process.codes(LIMIT)
    finally:
        process.end()
    assert code == [0], process.text("err")[-4_000:]
    return process.text("out")


def test_each_script_of_the_page_has_a_test() -> None:
    names = re.findall(r"\w+\.py", Path(__file__).read_text().partition("def test_each")[2])
    assert SCRIPTS.keys() - {"model.py"} <= set(names)


@pytest.mark.parametrize(
    "script",
    ["plain.py", "fsdp2.py", pytest.param("accelerated.py", marks=pytest.mark.full)],
)
def test_a_script_trains_on_two_ranks(script: str, folder: Path) -> None:
    if script == "accelerated.py":
        pytest.importorskip("accelerate", reason="pip install -e '.[eval]'")
    assert launch(folder / script) == [SCRIPTS[script][1], ""]


def test_lightning_trains(folder: Path) -> None:
    pytest.importorskip("lightning", reason="pip install lightning")
    assert run(folder / "lit.py").endswith(str(SCRIPTS["lit.py"][1]))


def test_a_lora_adapter_trains_and_merges(folder: Path) -> None:
    if not find_spec("peft"):
        pytest.skip("pip install -e '.[eval]'")
    assert run(folder / "lora.py") == SCRIPTS["lora.py"][1]


@pytest.mark.full
def test_trl_trains_and_its_model_imports(folder: Path) -> None:
    if not find_spec("trl"):
        pytest.skip("pip install -e '.[eval]', with Python 3.11 or newer")
    from nsa.data.tokenizer import ByteTokenizer
    from nsa.export.hf_tokenizer import write_tokenizer
    from nsa.model.hf import NSAConfig, NSAForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = NSAConfig(vocab_size=259, **shape, **heads)
    NSAForCausalLM(config).save_pretrained(folder / "exported")
    write_tokenizer(ByteTokenizer(), folder / "exported", 2_048)
    printed = run(folder / "sft.py", str(folder / "exported"))
    losses = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert (folder / "sft/last/model.safetensors").is_file()


PAGE = ROOT / "docs/guides/attention-variant.md"


def test_the_diffs_of_the_guide_apply_and_their_tests_pass(tmp_path: Path) -> None:
    for name in ("nsa", "tests"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for block in blocks(PAGE):
        if block.language == "diff":
            apply = ["git", "apply", "-"]
            done = subprocess.run(apply, cwd=tmp_path, input=block.text, text=True,
                                  capture_output=True)  # fmt: skip
            assert done.returncode == 0, f"line {block.line}: {done.stderr}"
    ruff = [sys.executable, "-m", "ruff"]
    for check in (["check"], ["format", "--check"]):
        lint = subprocess.run([*ruff, *check, "nsa/model", "tests/model"], cwd=tmp_path,
                              capture_output=True, text=True)  # fmt: skip
        assert lint.returncode == 0, lint.stdout
    files = ["tests/model/test_weighted.py", "tests/model/test_config.py"]
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout[-3_000:] + tests.stderr
