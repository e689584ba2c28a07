"""transformers' own tests of models (ModelTesterMixin) on our Hugging Face classes.

They are in transformers' source archive, which pip downloads for the installed version; nothing of
it is stored here, or installed.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.ranks import ROOT

# The archive lacks these modules, which its tests import.
STUBS = {
    "exporters/test_export.py": "class ExportTesterMixin: pass",
    "generation/test_utils.py": "class GenerationTesterMixin: pass",
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False, "output_hidden_states": True, "dtype": "float16",
    "chunk_size_feed_forward": 5, "problem_type": "regression",
    "id2label": {0: "label"}, "label2id": {"label": 0},
}""",
}
# Why a test may be skipped; docs/guides/hugging-face.md says so of what a user might expect.
SKIPPED = {
    "no attention maps": r"attentions|sdpa|grouped_mm|sliding window",
    "no such hardware or package": r"test requires|test is slow|Flash Attention|kernels library",
    "no tensor parallelism": r"TP plan",
    "RoPE is not scaled, and no module of its own": r"RoPE",
    "no mixture of experts": r"experts|router_logits",
    "no encoder, vision or audio part": r"composite|subconfigs|sequence-to-sequence",
    "no learned positions": r"position embeddings",
    "no weights kept in fp32, and none renamed at load": r"_keep_in_fp32_modules|No conversion",
    "hidden states of single layers cannot be selected": r"capture",
    "new weights are the trainer's, from its own generator": r"Not a prioritized model",
}


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        line = (done.stderr.strip() or "no output").splitlines()[-1]
        pytest.skip(f"pip {arguments[0]} cannot get the suite of transformers: {line}")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with transformers' `tests`, the modules that it lacks, and our case."""
    folder = tmp_path_factory.mktemp("suite")
    archive = f"transformers-{transformers.__version__}"
    source = ("--no-deps", "--no-binary=:all:", "--no-build-isolation")
    pip("download", *source, "--dest", str(folder), archive.replace("-", "=="))
    pip("install", "--no-deps", "--target", str(folder / "packages"), "parameterized")
    with tarfile.open(folder / f"{archive}.tar.gz") as opened:
        opened.extractall(
            folder, [m for m in opened if m.name.startswith(f"{archive}/tests/")], filter="data"
        )
    tests = (folder / archive / "tests").rename(folder / "tests")
    (tests / "__init__.py").touch()
    for name, text in STUBS.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text + "\n")
        (tests / name).with_name("__init__.py").touch()
    shutil.copyfile(ROOT / "tests/suites/transformers_models.py", tests / "test_nsa.py")
    return folder


@pytest.mark.full
def test_the_models_pass_transformers_own_tests(suite: Path) -> None:
    paths = os.pathsep.join(str(path) for path in (suite, suite / "packages", ROOT))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/test_nsa.py", "-q", "-rfEs", "--tb=line"),
            *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(suite), "-W", "ignore"),
        ],
        cwd=suite,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=900,
    )
    print(done.stdout)  # pytest -s shows counts and reasons
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.+)$", done.stdout, re.M)
    unknown = [line for line in reasons if not re.search("|".join(SKIPPED.values()), line)]
    assert not unknown, f"skipped without a reason that the docs give: {unknown}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) >= 70, done.stdout
