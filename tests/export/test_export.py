"""`nsa export`: transformers loads the trained model, with this package and without it."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.dynamic_module_utils import get_imports

import nsa.model.hf  # noqa: F401 (registers its classes with transformers)
from nsa.cli import main
from nsa.data.builtin import synthetic
from nsa.data.config import DataConfig
from nsa.data.tokenizer import ByteTokenizer, Tokenizer, build_tokenizer
from nsa.engine.load_run import load_run
from nsa.export import remote_code as exporter
from nsa.export.hf_tokenizer import write_tokenizer
from nsa.export.model_card import TO_SERVERS
from nsa.export.model_card import model_card as card_of
from nsa.export.remote_code import remote_code
from nsa.export.to_hf import dense_config, dense_family
from nsa.model import AttentionConfig, ModelConfig
from tests.data.texts import contents_of, train_tokenizer
from tests.disks import files_no_longer_than
from tests.engine.runs import TINY, load_profile, on_one_rank, read_metrics, succeed
from tests.evaluate.models import write_model
from tests.export.llamas import Refused, imported, logits, tokens
from tests.ranks import ROOT

TOKENS = torch.arange(96)[None]
TEXTS = (
    "def main():\n\treturn 0\r\n",
    " it says <|endoftext|> and <|pad|>, two  spaces",
    "é, 漢字 and 🙂\x00",
    "",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    succeed(
        on_one_rank("m7c.py", "--profile=demo", "--steps=6", *TINY, "--run-dir=tiny", folder=folder)
    )
    return folder / "tiny"


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    folder = run.parent / "exported"
    assert main(["export", str(run), "--to", str(folder)]) == 0
    return folder


def card(folder: Path) -> dict[str, str]:
    """The rows of the model card's tables."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", (folder / "README.md").read_text(), re.M)
    return dict(rows)


def test_exported_logits_are_the_trainers_bit_for_bit(run: Path, exported: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported)
    loaded = load_run(run, device="cpu")
    assert model.dtype == loaded.model.embed.weight.dtype == torch.bfloat16
    assert torch.equal(model(TOKENS).logits, loaded.model(TOKENS))
    assert model.config.max_position_embeddings == loaded.config.data.seq_len


def test_config_json_uses_the_names_that_other_tools_read(run: Path, exported: Path) -> None:
    config, model = json.loads((exported / "config.json").read_text()), load_run(run).config.model
    assert {
        "hidden_size": model.width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.mlp_width,
        "head_dim": model.head_dim,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": 0.02,
    }.items() <= config.items()
    assert not {"width", "layers", "heads", "kv_heads", "mlp_width"} & config.keys()


def test_a_run_is_imported_with_the_weights_that_it_trained(run: Path, tmp_path: Path) -> None:
    weight = imported(run, tmp_path / "again").model.embed.weight
    assert torch.equal(weight, load_run(run, device="cpu").model.embed.weight)


def test_fp32_weights_are_the_optimizers_master_weights(run: Path, tmp_path: Path) -> None:
    (tmp_path / "wide").mkdir()  # an empty folder is as good as none
    assert main(["export", str(run), "--to", str(tmp_path / "wide"), "--dtype", "fp32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    loaded = load_run(run, device="cpu", dtype=torch.float32)
    assert torch.equal(model(TOKENS).logits, loaded.model(TOKENS))
    weight = model.model.embed.weight
    assert not torch.equal(weight, weight.bfloat16().float())


def test_the_cards_figures_belong_to_the_exported_step(
    run: Path, exported: Path, tmp_path: Path
) -> None:
    checkpoint = run / "checkpoints" / "step00000003"
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "third")]) == 0
    rows = [row for row in read_metrics(run) if row["step"] <= 3]
    figures, last = card(tmp_path / "third"), rows[-1]
    assert figures["steps"] == "3 of 6"
    assert figures["tokens seen"].split()[0] == f"{last['tokens']:,.0f}"
    assert figures["training loss (nats per token)"].split()[0] == f"{last['loss']:.4f}"
    assert figures["dataset"] == "embedded"
    assert figures["torch"] == version("torch")
    assert (figures["recipe"], figures["world_size"]) == ("m7c", "1")
    assert "validation loss (nats per token)" not in figures  # the first is at step 4
    *_, last = (row for row in read_metrics(run) if row["val_loss"] is not None)
    for name, column in (
        ("validation loss (nats per token)", "val_loss"),
        ("validation bits per byte", "bits_per_byte"),
    ):
        assert card(exported)[name] == f"{last[column]:.4f} (step {last['step']:.0f})"


def test_the_card_names_datasets_of_the_hub_and_no_local_path(
    exported: Path, tmp_path: Path
) -> None:
    folder, text = tmp_path / "source", tmp_path / "secret" / "notes.txt"
    shutil.copytree(exported, folder)
    text.parent.mkdir()
    text.write_text("Some words. " * 200)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for source, datasets in (
        ("embedded", None),
        ("hf:org/corpus", ["org/corpus"]),
        ({"hf:org/one": 0.5, "hf:org/two": 0.5}, ["org/one", "org/two"]),
        ("fineweb_edu", ["HuggingFaceFW/fineweb-edu"]),
        ({"embedded": 0.5, "embedded:torch": 0.5}, None),
        ({"fineweb_edu": 0.75, str(text): 0.25}, ["HuggingFaceFW/fineweb-edu"]),
        (str(text), None),
        (f"hf:{text.parent}", None),
        ("hf:./secret", None),
    ):
        config["data"]["source"] = source
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        written = card_of(replace(load_run(folder), step=6))
        assert str(tmp_path) not in written
        data = ModelCard(written).data
        assert data.get("datasets") == datasets, source
        assert (data.license, data.library_name) == ("apache-2.0", "transformers")
        assert (data.pipeline_tag, data.tags) == ("text-generation", ["native-sparse-attention"])
        assert data.get("model-index") is data.get("metrics") is None
        assert ("| dataset | notes.txt (local) |" in written) == (source == str(text))
        assert ("| dataset | hf:org/one, hf:org/two |" in written) == ("hf:org/one" in source)
    assert "| dataset | secret (local) |" in written


def test_the_card_omits_what_the_run_did_not_record(exported: Path, tmp_path: Path) -> None:
    """An export knows no step, so the card of its export knows no training."""
    assert main(["export", str(exported), "--to", str(tmp_path / "again")]) == 0
    assert card(tmp_path / "again") == {}
    assert TO_SERVERS in (exported / "README.md").read_text()
    assert TO_SERVERS not in card_of(load_run(write_model(tmp_path / "three branches")))
    for name in ("model.safetensors", "config.json", "config.yaml", "tokenizer.json"):
        assert (tmp_path / "again" / name).read_bytes() == (exported / name).read_bytes()


def test_exported_files_share_permissions_and_keep_the_runs_config(
    run: Path, exported: Path
) -> None:
    read = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in (run, exported)]
    assert read[0] == read[1]
    modes = {stat.S_IMODE(file.stat().st_mode) for file in exported.iterdir()}
    # safetensors leaves its file to the owner alone
    assert modes == {stat.S_IMODE(exported.stat().st_mode) & 0o666}
    with safe_open(exported / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # which transformers reads


@pytest.mark.parametrize("kind", ["byte", "learned"])
def test_the_exported_tokenizer_gives_the_runs_ids_for_any_text(kind: str, tmp_path: Path) -> None:
    tokenizer: Tokenizer = ByteTokenizer()
    if kind == "learned":
        tokenizer = train_tokenizer(contents_of(synthetic(30_000)), 300, tmp_path / "learned")
    write_tokenizer(tokenizer, tmp_path / "written", 96)
    written = AutoTokenizer.from_pretrained(tmp_path / "written")
    assert written.eos_token_id == written.bos_token_id == tokenizer.eos_id
    assert len(written) == tokenizer.vocab_size
    for text in TEXTS:
        ids = written(text)["input_ids"]
        assert ids == tokenizer.encode(text.encode()).tolist()
        assert written.decode(ids) == text
    ended = [*tokenizer.encode(b"end").tolist(), tokenizer.eos_id]
    assert written.decode(ended, skip_special_tokens=True) == "end"
    if kind == "learned":  # so training can continue from an export
        again = build_tokenizer(DataConfig(tokenizer=f"hf:{tmp_path / 'written'}"))
        assert again.fingerprint == tokenizer.fingerprint
    assert written(["a", "abc"], padding=True)["attention_mask"][0][0] == 0
    # Fine-tuning on chats needs special tokens that are recognized in text.
    marked = AutoTokenizer.from_pretrained(tmp_path / "written", split_special_tokens=False)
    marked.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    marked.save_pretrained(tmp_path / "marked")
    for chat in (marked, AutoTokenizer.from_pretrained(tmp_path / "marked")):
        ids = chat(f"<|im_start|>hi{chat.eos_token}")["input_ids"]
        assert ids == [tokenizer.vocab_size, *tokenizer.encode(b"hi").tolist(), tokenizer.eos_id]


def test_a_non_empty_target_a_missing_run_or_a_full_disk_is_refused_and_leaves_no_files(
    run: Path, exported: Path, tmp_path: Path, refusal: Refused
) -> None:
    assert f"--to {exported}: already exists" in refusal("export", run, "--to", exported)
    nowhere, to = tmp_path / "nowhere", tmp_path / "new"
    assert "nowhere': there is no such folder" in refusal("export", nowhere, "--to", to)
    with files_no_longer_than(10_000):  # the weights are larger
        assert "cannot be written" in refusal("export", run, "--to", to)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """The remote code of an export, by file name."""
    return remote_code()


def test_the_remote_code_needs_only_torch_and_transformers(
    files: dict[str, str], tmp_path: Path
) -> None:
    assert files == remote_code()
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        assert set(get_imports(tmp_path / name)) <= allowed, name  # transformers refuses others
        imported = re.findall(r"^\s*from \.(\w+) import", text, re.M)
        assert {f"{other}.py" for other in imported} <= files.keys(), name
        for other, first in re.findall(r"^\s*from \.(\w+) import (\w+)", text, re.M):
            module = ROOT / other.replace("_", "/") / f"{first}.py"
            assert not module.exists(), f"{name} imports a module that is no name of {other}.py"
        assert not re.search(r"^\s*(from|import) nsa\b", text, re.M), name
        assert '"nsa::' not in text  # no clash with the package's or another export's ops


def test_each_version_of_the_code_has_a_namespace_of_its_own(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may load two exports; custom ops are global in it."""

    def namespaces(files: dict[str, str]) -> set[str]:
        return set(re.findall(r'"(nsa_\w+)::', "".join(files.values())))

    source = exporter._source
    changed = tmp_path / "changed.py"
    changed.write_text(source("nsa.ops.pooling").read_text() + "# changed\n")
    monkeypatch.setattr(
        exporter, "_source", lambda name: changed if name == "nsa.ops.pooling" else source(name)
    )
    before, after = namespaces(files), namespaces(remote_code())
    assert len(before) == len(after) == 1
    assert before != after


WITHOUT_THE_PACKAGE = """
import importlib, os, sys
site, root, folder, sparse, out = sys.argv[1:]
sys.path.append(site)
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
base = AutoModel.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
prompts = tokenizer(["def f(", "a"], return_tensors="pt", padding=True)
outputs = {
    "logits": model(torch.arange(96)[None]).logits,
    "from_base": model.lm_head(base(torch.arange(96)[None]).last_hidden_state),
    "text": model.generate(**prompts, max_new_tokens=5, do_sample=False),
}
model.save_pretrained(os.path.join(out, "saved"))
sparsified = AutoModelForCausalLM.from_pretrained(sparse, trust_remote_code=True)
outputs["sparsified"] = sparsified(torch.arange(80)[None]).logits
package = type(model).__module__.rpartition(".")[0]
for file in os.listdir(folder):  # kernels among them, which only a GPU would need
    if file.endswith(".py"):
        importlib.import_module(f"{package}.{file[:-3]}")
assert "nsa" not in sys.modules
sys.path.append(root)
import nsa.model.hf
local = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
outputs["package"] = type(local).__module__
outputs["beside"] = local(torch.arange(96)[None]).logits
torch.save(outputs, os.path.join(out, "outputs.pt"))
"""


def test_exports_work_without_this_package(
    exported: Path, sparse: Path, files: dict[str, str], tmp_path: Path
) -> None:
    """And once the package is imported, its classes replace the remote code."""
    elsewhere = tmp_path / "copied", tmp_path / "sparse"
    for folder, copy in zip((exported, sparse), elsewhere, strict=True):
        shutil.copytree(folder, copy)
    arguments = [sysconfig.get_path("purelib"), *map(str, (ROOT, *elsewhere, tmp_path))]
    done = subprocess.run(
        # -I and -S: neither the working directory nor site-packages is on the path.
        [sys.executable, "-I", "-S", "-c", WITHOUT_THE_PACKAGE, *arguments],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outputs = torch.load(tmp_path / "outputs.pt")
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert torch.equal(outputs["logits"], model(TOKENS).logits)
    assert torch.equal(outputs["beside"], outputs["logits"])
    assert torch.equal(outputs["from_base"], outputs["logits"])
    assert outputs["package"] == "nsa.model.hf"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompts = tokenizer(["def f(", "a"], return_tensors="pt", padding=True)
    text = model.generate(**prompts, max_new_tokens=5, do_sample=False)
    assert torch.equal(outputs["text"], text)
    model = AutoModelForCausalLM.from_pretrained(sparse)
    assert torch.equal(outputs["sparsified"], model(torch.arange(80)[None]).logits)
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["auto_map"] == json.loads((exported / "config.json").read_text())["auto_map"]
    assert {path.name for path in (tmp_path / "saved").glob("*.py")} == files.keys()


def test_saving_with_the_package_drops_auto_map(exported: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    assert type(model).__module__ == "nsa.model.hf"
    model.save_pretrained(tmp_path)
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        (
            {"attention": AttentionConfig()},
            r"branches = 'cmp\+sel\+win': a dense model has one set",
        ),
        ({"qkv_bias": True, "qk_norm": True}, "no dense family has qkv_bias and qk_norm; omit"),
        ({"no_rope_every": 4, "qk_norm": True}, "no dense family has qk_norm and no_rope_every"),
        ({"value_dim": 32}, "value_dim = 32: dense families have values of head_dim = 64"),
    ],
)
def test_what_no_dense_family_has_is_refused_by_its_setting(
    changes: dict[str, Any], refusal: str
) -> None:
    dense = ModelConfig(attention=AttentionConfig("dense"))
    assert dense_family(dense) == "llama"
    every_fourth = dense_config(replace(dense, layers=8, no_rope_every=4))
    assert every_fourth.no_rope_layers == [1, 1, 1, 0] * 2
    with pytest.raises(ValueError, match=f"--attention dense: .*{refusal}"):
        dense_family(replace(dense, **changes))


def test_a_sparse_run_is_exported_as_the_dense_model_that_reads_all_its_keys(
    tmp_path: Path,
) -> None:
    """Logits are those of dense attention, and no other code is needed."""
    spec = ("block_len=8", "block_stride=8", "select_len=8", "select_top=6")
    settings = [f"model.attention.spec.{setting}" for setting in spec]
    settings += ["model.attention.branches=sel", "model.attention.compressor=pool"]
    settings += ["model.heads=4", "model.tied_head=false", "data.seq_len=256"]
    write_model(tmp_path / "run", *settings)
    to, flags = tmp_path / "hf", ["--attention=dense", "--dtype=fp32"]
    assert main(["export", str(tmp_path / "run"), "--to", str(to), *flags]) == 0
    model, report = LlamaForCausalLM.from_pretrained(to, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weight
    assert not [*to.glob("*.py"), *to.glob("*.yaml")]
    run = load_run(tmp_path / "run", device="cpu", dtype=torch.float32)
    ids = tokens(250) % 256
    sparse = logits(run.model, ids)
    run.model.set_dense(True)
    expected = logits(run.model, ids)
    assert (logits(model, ids) - expected).norm() < 1e-5 * expected.norm()
    assert (sparse - expected).norm() > 1e-4 * expected.norm()
    assert "auto_map" not in json.loads((to / "config.json").read_text())
    text = AutoTokenizer.from_pretrained(to)("def f", return_tensors="pt")
    assert text.input_ids.tolist() == [list(b"def f")]
    model.generate(**text, max_new_tokens=2)
    card = (to / "README.md").read_text()
    assert "native-sparse-attention" not in card
    assert "trust_remote_code" not in card
    assert "figures below" not in card, "a model without a step has none"
    m7c: Any = SimpleNamespace(config=load_profile("m7c", "production"), step=None, tokenizer=None)
    m7c.folder = Path("m7c")
    assert "of 125.0M parameters with sparse" in card_of(m7c)
    assert "of 122.4M parameters with dense" in card_of(m7c, dense=True), "without its index"
    m7c.step = 9
    assert "(training and the figures below: sparse attention)" in card_of(m7c, dense=True)


def test_heads_that_do_not_divide_the_width_make_a_mistral(tmp_path: Path) -> None:
    """LlamaConfig refuses such a shape, which the demo has."""
    demo = load_profile("m7c_dense", "demo").model
    config = dense_config(demo)
    assert (config.model_type, config.sliding_window) == ("mistral", None)
    assert dense_config(replace(demo, heads=4)).model_type == "llama"
    config.save_pretrained(tmp_path / "saved")
    assert AutoConfig.from_pretrained(tmp_path / "saved").sliding_window is None
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(config).eval()
    original.save_pretrained(tmp_path / "original")
    imported(tmp_path / "original", tmp_path / "run")
    arguments = ["--to", str(tmp_path / "hf"), "--attention=dense"]
    assert main(["export", str(tmp_path / "run"), *arguments]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(logits(model, tokens(100)), logits(original, tokens(100)))
