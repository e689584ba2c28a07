"""A model that is imported and exported keeps what training did not change, and leaks nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from transformers import AutoTokenizer, LlamaForCausalLM

from nsa.cli import main
from nsa.data.config import DataConfig
from nsa.data.tokenizer import ORIGIN, build_tokenizer
from nsa.export.hf_tokenizer import write_tokenizer
from nsa.export.model_card import NO_TOKENIZER
from nsa.export.origin import Origin, find_origin, write_origin
from nsa.export.to_hf import export
from nsa.model.hf import NSAForCausalLM
from tests.disks import set_fields
from tests.export.llamas import SMALL, Refused, add_chat_tokenizer, imported, llama

# As of a model that others trained: positions, ids and fields of no default.
FIELDS: dict[str, Any] = {
    "max_position_embeddings": 8_192,
    "bos_token_id": 0,
    "eos_token_id": 3,
    "pad_token_id": 2,
    "use_cache": False,
    "pretraining_tp": 2,
    "transformers.js_config": {"dtype": "q4"},
    "rope_theta": 3e4,  # as transformers 4 wrote it
    "rope_scaling": None,
    "torch_dtype": "float32",
}
GENERATION = {"bos_token_id": 0, "eos_token_id": [1, 3], "temperature": 0.2, "do_sample": True}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "model"
    llama(folder)
    add_chat_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    (folder / "config.json").write_text(json.dumps(config | FIELDS))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    machine = {"local_files_only": True, "is_local": True, "auto_map": {"AutoTokenizer": "x.X"}}
    set_fields(folder / "tokenizer_config.json", model_max_length=8_192, **machine)
    return folder


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    """A copy of the original, which a test edits."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def settings(folder: Path, name: str = "config.json") -> dict[str, Any]:
    tree = json.loads((folder / name).read_text())
    return {key: value for key, value in tree.items() if key != "transformers_version"}


@pytest.mark.parametrize("attention", ["dense", "nsa"])
def test_an_export_of_an_import_keeps_the_sources_fields(
    attention: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(original, tmp_path / "start", f"--attention={attention}", *SMALL)
    (tmp_path / "run").mkdir()
    for name in ("config.yaml", "model.safetensors"):  # as of a run that started from the import
        shutil.copy(tmp_path / "start" / name, tmp_path / "run")
    capsys.readouterr()
    to = export(tmp_path / "run", tmp_path / "hf", dense=attention == "dense")
    config, before = settings(to), settings(original)
    lines = capsys.readouterr().out.splitlines()
    lost = [] if attention == "dense" else ["architectures", "model_type"]
    assert [line.split()[1] for line in lines] == lost
    assert {name for name in before if config.get(name) != before[name]} == {*lost, "torch_dtype"}
    origin = find_origin(to, None)  # for a run that starts from the export
    assert origin == find_origin(tmp_path / "start", None)
    assert config["dtype"] == "float32"
    assert ModelCard.load(to / "README.md").data.get("base_model") is None  # not one of the Hub
    assert settings(to, "generation_config.json") == GENERATION
    tokenizer = settings(to, "tokenizer_config.json")
    assert tokenizer["model_max_length"] == 8_192
    gone = {"local_files_only", "is_local", "auto_map"}
    assert settings(original, "tokenizer_config.json").keys() - tokenizer.keys() == gone
    kind = LlamaForCausalLM if attention == "dense" else NSAForCausalLM
    model = kind.from_pretrained(to)
    assert model.config.max_position_embeddings == 8_192
    assert model.config.bos_token_id == AutoTokenizer.from_pretrained(to).bos_token_id == 0
    assert model.generation_config.temperature == 0.2
    again = export(tmp_path / "run", tmp_path / "again", "bf16", dense=attention == "dense")
    assert settings(again)["dtype"] == "bfloat16"
    assert "config.json: torch_dtype = 'bfloat16', was 'float32'" in capsys.readouterr().out


@pytest.mark.parametrize("attention", ["dense", "nsa"])
def test_what_an_import_changes_is_changed_in_the_export_and_printed(
    attention: str, original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    is_llama = attention == "dense"
    rope = ["rope_type=linear", "rope_extension={factor: 2}"] if is_llama else ["rope_theta=5e4"]
    changes = [*(f"--set=model.{change}" for change in rope), "--set=data.seq_len=16384"]
    changes += ["--tokenizer=byte", f"--attention={attention}"]
    imported(original, tmp_path / "run", *changes)
    capsys.readouterr()
    flags = ["--attention=dense"] if is_llama else []
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf"), *flags]) == 0
    config = settings(tmp_path / "hf")
    assert config["dtype"] == "float32", "as in training, without --dtype"
    lines = capsys.readouterr().out
    assert "config.json: max_position_embeddings = 16384, was 8192\n" in lines
    if is_llama:
        linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e4}
        assert config["rope_parameters"] == linear
    else:
        assert config["rope_theta"] == 5e4
    assert f"config.json: rope_theta = {None if is_llama else 5e4}, was 30000.0\n" in lines
    assert ("rope_parameters" in config, "rope_theta" in config) == (is_llama, not is_llama)
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [257, 257, 258]
    assert settings(tmp_path / "hf", "generation_config.json")["eos_token_id"] == 257


def test_a_model_whose_tokenizer_is_lost_keeps_its_ids(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imported(original, tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "found")]) == 0
    assert "no tokenizer files" not in capsys.readouterr().out
    (tmp_path / "run/tokenizer.json").unlink()
    config_file = tmp_path / "run/config.yaml"
    config_file.write_text(config_file.read_text().replace("tokenizer: hf:", "tokenizer: hf:/no"))
    with pytest.warns(UserWarning, match="no tokenizer"):
        assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "hf")]) == 0
    size = (tmp_path / "hf/model.safetensors").stat().st_size / 1e6
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert lines[0].startswith(f"{tmp_path / 'hf'}: {size:.1f} MB of weights")
    assert lines[1].startswith("no tokenizer files")
    assert NO_TOKENIZER in (tmp_path / "hf/README.md").read_text()
    config = settings(tmp_path / "hf")
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [0, 3, 2]


def test_another_model_types_fields_of_attention_are_left_out(tmp_path: Path) -> None:
    llama(tmp_path / "mistral")
    code = {"auto_map": {"AutoConfig": "evil.Evil"}}
    file = tmp_path / "mistral/config.json"
    set_fields(file, model_type="mistral", sliding_window=4_096, **code)
    imported(tmp_path / "mistral", tmp_path / "run", "--attention=dense")
    config = settings(export(tmp_path / "run", tmp_path / "hf", dense=True))
    assert config["model_type"] == "llama"
    assert not {"sliding_window", "auto_map"} & config.keys()
    origin = json.loads((tmp_path / "run" / ORIGIN).read_text())
    origin["config"]["model_type"] = "gpt2"
    (tmp_path / "run" / ORIGIN).write_text(json.dumps(origin))
    with pytest.raises(ValueError, match=f"{ORIGIN}: model_type = 'gpt2': is none of llama, mis"):
        export(tmp_path / "run", tmp_path / "other")


def test_the_card_of_an_untrained_import_claims_no_training(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for license, sentence in (
        ("mit", "the license at the top is that of someone/tiny"),
        (None, "state the license of someone/tiny at the top"),
    ):
        set_fields(copy / "config.json", _name_or_path="someone/tiny")
        stated = license or "[no YAML"
        metadata = f"---\nlicense: {stated}\nmodel-index: wrong\n---\n"
        (copy / "README.md").write_text(metadata)
        imported(copy, tmp_path / f"run-{license}", *SMALL)
        folder = export(tmp_path / f"run-{license}", tmp_path / f"hf-{license}")
        assert "_name_or_path" not in capsys.readouterr().out, "no change to report"
        card = ModelCard.load(folder / "README.md")
        assert card.data.license == (license or "other")
        assert card.data.base_model == "someone/tiny"
        recorded = license or "not recorded"
        assert f"Its weights come from someone/tiny, whose license is {recorded}." in card.text
        assert str(tmp_path) not in card.content
        assert (card.data.language, card.data.get("datasets")) == (None, None)
        assert f"Before you publish this folder: {sentence}." in card.text
        for claim in ("the code's", "trained on", "## Training", "embedded"):
            assert claim not in card.text


def test_a_link_out_of_the_folder_is_refused(
    copy: Path, original: Path, tmp_path: Path, refusal: Refused, refused: Refused
) -> None:
    secret = tmp_path / "model.key"  # begins as the folder's path
    secret.write_text("a key")
    (copy / "merges.txt").symlink_to("tokenizer.json")  # stays inside
    imported(copy, tmp_path / "run")
    nested = "additional_chat_templates/other.jinja"
    for name in ("merges.txt", "chat_template.jinja", "config.json", nested):
        shutil.rmtree(copy)
        shutil.copytree(original, copy)
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).unlink(missing_ok=True)
        (copy / name).symlink_to(secret)
        assert name == "config.json" or "is a link to a file outside" in refused(copy)
    folder = tmp_path / "run"  # and an import of someone else's, at its export
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(secret)
    assert "is a link to a file outside" in refused(folder)
    error = refusal("export", folder, "--to", tmp_path / "hf")
    assert "chat_template.jinja: is a link to a file outside" in error
    assert not (tmp_path / "hf").exists()


def test_a_snapshot_of_the_hubs_cache_links_to_its_blobs(
    original: Path, tmp_path: Path, refused: Refused
) -> None:
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(original, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    imported(snapshot, tmp_path / "run")
    (tmp_path / "secret").write_text("a key")
    (blobs / "chat_template.jinja").unlink()
    (blobs / "chat_template.jinja").symlink_to(tmp_path / "secret")
    assert "is a link to a file outside" in refused(snapshot)


def test_a_second_configuration_file_is_neither_read_nor_run(
    copy: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would read it instead of config.json, and ask whether to run its code."""
    (copy / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    first, second = copy / "config.json", copy / "config.4.0.0.json"
    shutil.copy(first, second)
    set_fields(second, model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    set_fields(first, configuration_files=[second.name])
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "configuration_files = ['config.4.0.0.json']: transf" in refused(copy)
    set_fields(first, model_type="granite")
    assert "configuration_files" in refused(copy)
    set_fields(first, configuration_files=[first.name])
    assert "granite': has multipliers of embeddings" in refused(copy)
    assert not (tmp_path / "ran").exists()


def test_generation_settings_that_are_no_settings_are_refused(
    copy: Path, tmp_path: Path, refusal: Refused, refused: Refused
) -> None:
    imported(copy, tmp_path / "run")
    for place in (copy, tmp_path / "run"):
        (place / "generation_config.json").write_text("[]")
    assert "generation_config.json: not the JSON of a configuration" in refused(copy)
    error = refusal("generate", tmp_path / "run", "--prompt=a", "--max-new-tokens=1")
    assert "generation_config.json: not the JSON of a configuration" in error


def test_a_tokenizer_without_an_origin_is_exported_without_the_machines_settings(
    tmp_path: Path,
) -> None:
    (tmp_path / "chat").mkdir()
    add_chat_tokenizer(tmp_path / "chat")
    tokenizer = build_tokenizer(DataConfig(tokenizer=f"hf:{tmp_path / 'chat'}"))
    write_tokenizer(tokenizer, tmp_path / "written", 96)
    tree = settings(tmp_path / "written", "tokenizer_config.json")
    assert not {"local_files_only", "is_local"} & tree.keys()
    assert (tree["model_max_length"], tree["padding_side"]) == (96, "left")
    assert tree["pad_token"] == "</s>", "its end, as it has no padding"
    (tmp_path / "chat").rename(tmp_path / "plain")
    (tmp_path / "plain/chat_template.jinja").unlink()
    tokenizer = build_tokenizer(DataConfig(tokenizer=f"hf:{tmp_path / 'plain'}"))
    write_tokenizer(tokenizer, tmp_path / "again", 96)
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert {"<|im_start|>", "<|im_end|>"} <= {*again.all_special_tokens}


@pytest.mark.parametrize("saved", ["owner/model", "/home/me/model", None])
def test_a_model_is_named_as_on_the_hub_else_by_its_folder(
    saved: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_origin(Path(), {"model_type": "nsa", "_name_or_path": saved}, tmp_path)
    name = saved if saved == "owner/model" else tmp_path.name
    assert find_origin(tmp_path, None) == Origin(name, None, None)


def test_an_import_of_an_earlier_version_keeps_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ORIGIN).write_text('{"name": "owner/model", "license": "mit"}')
    origin = Origin("owner/model", "mit", None)
    for start_from in (str(tmp_path), "~"):
        assert find_origin(tmp_path / "run", start_from) == origin, "which the run started from"
    assert find_origin(tmp_path, None) == origin
