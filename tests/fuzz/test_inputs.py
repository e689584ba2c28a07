"""Settings, datasets, run folders and models of others: used, or refused in one line.

Indexes, shards and text files; heartbeats, tables and JSON, as the watchdog and reports read them;
checkpoints, exports and Llamas, damaged or forged, by `nsa generate`, `nsa import` and `--resume`.
"""

import contextlib
import hashlib
import json
import os
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from nsa.checkpoint.commit import MANIFEST, manifest_text, newest_valid, sync_and_hash
from nsa.checkpoint.state_file import read_state_file
from nsa.data.files import open_files
from nsa.data.shards import INDEX, open_shards
from nsa.data.source import DataError
from nsa.engine.config import RunConfig, walk
from nsa.engine.recipe import Recipe, build_parser, resolve_request
from nsa.engine.resume import read_state
from nsa.export.to_hf import export
from nsa.monitor.artifacts import read_rank
from nsa.report.report import draw_plots, summarise
from nsa.watchdog.hang_detector import HangDetector
from tests.data.test_shards import write_folder
from tests.evaluate.models import write_model
from tests.fuzz.hostile import (
    ESCAPE,
    VALUES,
    damaged,
    files,
    mutated,
    run,
    time_limit,
    to_json,
    values,
)
from tests.monitor.run_folders import make_beat, write_limits
from tests.ranks import ROOT

TREE = asdict(RunConfig())
NAMES = [name for name, _ in walk(TREE)]
YAML = yaml.safe_dump(TREE).encode()
TAGS = ("!!python/object/apply:os.system [touch {}]", "!!python/name:os.system ", "!!binary x")
TRICKS = (
    *("&a [*a, *a]", "*a", "{<<: {a: 1}}", "? [1]\n: 2", "2001-99-99", "1:2:3", "0x" + "f" * 5_000),
    *("[" * 3_000, "{" * 3_000, "- " * 3_000, "!!int x", "!!float []", "!!timestamp 3", "=", "- !"),
    *("!!set {a, a}", "!!omap [1]", "!!pairs [[1]]", "%YAML 9.9\n---\n1", "--- 1\n--- 2", "\t- a"),
)


RECIPE = Recipe("m7c", "", {"demo": runpy.run_path(str(ROOT / "recipes/m7c.py"))["demo"]})


def resolve(folder: Path, *flags: str) -> None:
    """What a recipe does before it builds the model; `main` prints a ValueError and exits."""
    command = ["--profile=demo", f"--run-dir={folder / 'run'}", *flags]
    with time_limit(), contextlib.suppress(ValueError):
        resolve_request(RECIPE, build_parser(RECIPE).parse_args(command))
    assert not (folder / "ran").exists()


def test_any_value_of_a_flag_is_accepted_or_refused(
    fuzz: Callable[..., None], tmp_path: Path
) -> None:
    tags = [tag.format(tmp_path / "ran") for tag in TAGS]
    texts = st.one_of(
        st.sampled_from((*TRICKS, *tags)),
        st.text(),
        values().map(lambda value: json.dumps(value)),
        st.integers(1, 5_000).map(lambda digits: "1" + "0" * digits),
    )
    names = st.sampled_from((*NAMES, "attention", "attention.kind", "")) | st.text(max_size=12)
    numeric = st.sampled_from(("--until", "--time-limit", "--profile-steps"))
    numbers = st.text() | st.sampled_from([str(value) for value in VALUES[:16]])
    numbers |= st.from_regex(re.compile(r"[0-9hms.\-]{1,12}"), fullmatch=True)

    def check(flag: str, text: str) -> None:
        resolve(tmp_path, f"{flag}={text}")

    fuzz(check, 30, flag=names.map("--set={}".format), text=texts)
    fuzz(check, 15, flag=numeric, text=numbers)


def test_any_config_file_is_accepted_or_refused(
    fuzz_file: Callable[..., None], tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    tags = [tag.format(tmp_path / "ran") for tag in TAGS]
    snippets = st.tuples(st.sampled_from(NAMES), st.sampled_from((*TRICKS, *tags)))
    contents = st.one_of(
        mutated(TREE).map(lambda tree: json.dumps(tree).encode()),
        damaged(YAML),
        snippets.map(lambda pair: f"{pair[0].replace('.', ': {')}: {pair[1]}".encode()),
        st.sampled_from((*TRICKS, *tags)).map(lambda text: f"train: {text}".encode()),
    )

    fuzz_file(file, 15, contents, partial(resolve, tmp_path, f"--config={file}"))


def test_yaml_aliases_are_refused(tmp_path: Path) -> None:
    """They could name a billion values in ten lines, in a list or in merged mappings."""
    lists = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12))
    maps = "\n".join(
        f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12)
    )
    for text in (f"a0: &a0 [1]\n{lists}", f"a0: &a0 {{b: 1}}\n{maps}"):
        (tmp_path / "config.yaml").write_text(text)
        flags = build_parser(RECIPE).parse_args([f"--config={tmp_path / 'config.yaml'}"])
        with pytest.raises(ValueError, match=r"is an alias; write the value itself"):
            resolve_request(RECIPE, flags)


@pytest.mark.parametrize("name", ["zero1_pcie.json", "zero3.json"])
def test_any_deepspeed_json_is_accepted_or_refused_in_one_line(
    fuzz_file: Callable[..., None], name: str, tmp_path: Path
) -> None:
    tree, file = json.loads((ROOT / "ds_configs" / name).read_text()), tmp_path / "ds.json"
    fuzz_file(file, 13, files(tree), partial(run, "check", file))


SHARD = "train-000-00000.bin"


def check(folder: Path) -> None:
    """Check a prepared folder, and read it as training does."""
    run("data", "check", folder)
    with time_limit():
        for split in ("train", "val"):
            with contextlib.suppress(DataError):
                store = open_shards(str(folder), split)
                tokens = store.read(0, len(store))
                assert tokens.max() < store.stamp.vocab_size


@pytest.mark.parametrize(("name", "examples"), [(INDEX, 30), (SHARD, 20)])
def test_any_index_or_shard_is_read_or_refused_in_one_line(
    fuzz_file: Callable[..., None], name: str, examples: int, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "prepared")
    intact = (folder / name).read_bytes()
    contents = files(json.loads(intact)) if name == INDEX else damaged(intact)
    fuzz_file(folder / name, examples, contents, partial(check, folder))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_any_text_file_is_read_or_refused_by_name(
    fuzz_file: Callable[..., None], suffix: str, tmp_path: Path
) -> None:
    """The error names the file, wherever it is broken."""
    path, texts = tmp_path / f"text{suffix}", [f"text {number} of several" for number in range(200)]
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path)
    else:
        with pa.output_stream(str(path), compression="detect") as stream:
            stream.write("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())

    def read() -> None:
        error = str(path)
        with time_limit():
            try:
                source = open_files(path, "text")
                source.size()
                list(source.read())
            except DataError as raised:
                error = str(raised)
        assert str(path) in error

    fuzz_file(path, 15, damaged(path.read_bytes()), read)


@pytest.mark.parametrize("name", [INDEX, SHARD])
def test_a_pipe_in_a_prepared_folder_does_not_block(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "prepared")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    check(folder)
    assert run("data", "check", folder) == 2


def test_a_shard_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "prepared")
    other = write_folder(tmp_path / "other")
    tree = json.loads((folder / INDEX).read_text())
    tree["shards"][0]["name"] = f"../{other.name}/train-000-00000.bin"
    (folder / INDEX).write_text(json.dumps(tree))
    digest = hashlib.sha256((other / SHARD).read_bytes()).hexdigest()
    assert tree["shards"][0]["sha256"] == digest, "its content would be right"
    with pytest.raises(DataError, match=r"damaged .*\.\./other/train"):
        open_shards(str(folder), "train")


PID = 2**22  # of no process
CSV = "step,tokens,loss,val_loss,bits_per_byte,lr,grad_norm,tokens_per_s,mfu,memory_gb,seconds\n"
ROW = "{},9,3.5,,,1e-4,0.5,100.0,,1.5,0.5\n"
GATE = {
    **{"gate": "sanity", "step": 1, "go": True, "time": "2026-01-01"},
    "criteria": [{"name": "a", "ok": True, "value": 1.5, "limit": "b", "evidence": "c"}],
}
ENV = {
    **{"world_size": 2, "recipe": "m7c", "profile": "demo", "git_commit": "ab", "host": "a"},
    **{"packages": {"torch": "2"}, "cpu": {"model": "b"}, "notes": ["c"], "cuda": None},
}


def look(folder: Path) -> None:
    """What a watchdog does twice a second."""
    with time_limit():
        HangDetector(folder).check({0: PID})


def test_any_heartbeat_is_read_in_time(fuzz: Callable[..., None], tmp_path: Path) -> None:
    write_limits(tmp_path)
    events = st.sampled_from(("start", "progress", "step_end", "end"))
    good = make_beat(
        0, pid=PID, loss=1.5, memory_gb=1.5, gpu_busy=0.5, backend="nccl", status=ESCAPE
    )
    lines = st.one_of(
        mutated(good).map(to_json),
        mutated(good).map(to_json),
        damaged(to_json(good)),
        events.map(lambda event: to_json({**good, "event": event})),
    )

    def check(written: list[bytes]) -> None:
        (tmp_path / "heartbeat_rank0.jsonl").write_bytes(b"\n".join(written) + b"\n")
        look(tmp_path)
        with time_limit():
            read_rank(tmp_path, 0)

    fuzz(check, 38, written=st.lists(lines, min_size=1, max_size=6))


def test_any_watchdog_limits_are_read_in_time(
    fuzz_file: Callable[..., None], tmp_path: Path
) -> None:
    write_limits(tmp_path)
    (tmp_path / "heartbeat_rank0.jsonl").write_bytes(to_json(make_beat(0, pid=PID)) + b"\n")
    tree = {"monitor": {"heartbeat": 1.0, "watch": {"compute": 20.0, "grace": 0.5}}}
    fuzz_file(tmp_path / "config.yaml", 15, files(tree), partial(look, tmp_path))


def test_any_file_of_a_run_is_reported_as_safe_markdown(
    fuzz: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without plots, which take seconds each; the test of metrics tables draws two."""
    monkeypatch.setattr("nsa.report.report.draw_plots", lambda run: [])
    (tmp_path / "metrics.csv").write_text(CSV + "".join(map(ROW.format, range(1, 30))))
    trees: dict[str, Any] = {
        "env.json": ENV,
        "gates.json": [GATE],
        "halt.json": {"reason": "a", "rank": 0},
        "ds_config.json": {"zero_optimization": {"stage": 1}},
        "config.yaml": {"model": {"layers": 2}, "data": {"source": "a"}},
    }
    parts = {name: (to_json(tree), files(tree)) for name, tree in trees.items()}
    table = b"operation,backend,reason,calls\na,b,c,3\n"
    parts["fallbacks.csv"] = table, damaged(table)

    def check(name: str, data: st.DataObject) -> None:
        for other, (intact, contents) in parts.items():
            (tmp_path / other).write_bytes(data.draw(contents) if other == name else intact)
        run("report", tmp_path)
        text = (tmp_path / "report.md").read_text()
        assert not [part for part in ("<script", "http://", "\x1b") if part in text]

    fuzz(check, 38, name=st.sampled_from(sorted(parts)), data=st.data())


def test_any_metrics_table_is_summarised_and_plotted_in_time(
    fuzz: Callable[..., None], tmp_path: Path
) -> None:
    table = (CSV + "".join(map(ROW.format, range(1, 40)))).encode()
    cells = st.sampled_from(("inf", "-1", "nan", "1e308", "", "x", "9" * 400, "1_0", "٣"))

    def check(content: bytes, row: list[str], drawn: bool) -> None:
        (tmp_path / "metrics.csv").write_bytes(content + ",".join(row).encode() + b"\n")
        look(tmp_path)
        with time_limit():
            run_summary = summarise(tmp_path)
            for column in CSV.strip().split(","):
                run_summary.last(column)
            if drawn:
                with contextlib.suppress(ValueError):  # numbers that no axis can show
                    draw_plots(run_summary)

    rows = st.lists(cells, min_size=11, max_size=11)
    contents = damaged(table) | st.just(table)
    fuzz(check, 15, content=contents, row=rows, drawn=st.just(False))
    fuzz(check, 2, content=contents, row=rows, drawn=st.just(True))


@pytest.mark.parametrize(
    "name", ["heartbeat_rank0.jsonl", "metrics.csv", "env.json", "gates.json", "config.yaml"]
)
def test_a_pipe_in_a_run_folder_does_not_block(name: str, tmp_path: Path) -> None:
    write_limits(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    look(tmp_path)
    run("compare", tmp_path, "--out", tmp_path / "a.png")
    run("report", tmp_path)


def test_json_text_of_a_report_is_escaped(tmp_path: Path) -> None:
    html = r"<img src=x onerror=alert(1)> [click](http://evil) \[x] ![x](http://b.png) www.a WWW.a"
    env: dict[str, Any] = {**ENV, "recipe": html, "notes": [html, "a\n# b"]}
    (tmp_path / "env.json").write_text(json.dumps(env))
    gate = json.loads(json.dumps(GATE).replace('"b"', json.dumps(html)))
    (tmp_path / "gates.json").write_text(json.dumps([gate]))
    assert run("report", tmp_path) == 0
    text = (tmp_path / "report.md").read_text()
    for part in ("<img", " [click]", "http://", "www.", "\n# b"):
        assert part not in text.lower(), part
    escaped = r"&lt;img src=x onerror=alert(1)> \[click\](http:&#47;/evil) \\\[x\] !\[x\]"
    assert text.count(escaped) == 3


STEP = "step00000003"
TRAINED = {"step": 3, "tokens": 9, "samples": 1, "data": "x", "skipped": 0, "passed_over": []}
STATE = {
    "state": TRAINED,
    "saved_under": {"layout": "0", "precision": "fp32", "ranks": 1},
    "tokenizer": {"name": "byte", "fingerprint": "x"},
}
MANIFEST_TREE = {
    **{"torch": "2.8", "deepspeed": "0.19", "saved_under": STATE["saved_under"]},
    **{"step": 3, "ranks": 1, "time": 1.5e9},
}
WEIGHTS = "mp_rank_00_model_states.pt"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The only checkpoint, of ZeRO stage 0, of a run that `nsa generate` loads."""
    model = write_model(tmp_path / "model", "train.precision=fp32")
    checkpoint = tmp_path / "run/checkpoints" / STEP
    checkpoint.mkdir(parents=True)
    for folder in (checkpoint, tmp_path / "run"):
        shutil.copyfile(model / "config.yaml", folder / "config.yaml")
    torch.save({"module": load_file(model / "model.safetensors")}, checkpoint / WEIGHTS)
    torch.save({}, checkpoint / "rng_rank0.pt")
    trained = {name: x for name, x in STATE.items() if name != "tokenizer"}
    (checkpoint / "state.json").write_bytes(to_json(trained))
    assert generate(checkpoint, rehash=True) == 0
    return checkpoint


def generate(checkpoint: Path, rehash: bool = False) -> int:
    """Generate from the checkpoint's run; `rehash` its files first, as an attacker does too."""
    if rehash:
        names = sorted(path.name for path in checkpoint.iterdir() if path.name != MANIFEST)
        entries = {name: sync_and_hash(checkpoint / name) for name in names}
        (checkpoint / MANIFEST).write_text(manifest_text({**MANIFEST_TREE, "files": entries}))
    run_dir = checkpoint.parent.parent
    return run("generate", run_dir, "--prompt=a", "--max-new-tokens=1", exact_stdout=True)


def test_any_manifest_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], checkpoint: Path
) -> None:
    tree = json.loads((checkpoint / MANIFEST).read_text())
    del tree["sha256"]

    def use() -> None:
        with time_limit():
            newest_valid(checkpoint.parent)
        generate(checkpoint)

    hashed = mutated(tree).map(lambda forged: manifest_text(forged).encode())
    fuzz_file(checkpoint / MANIFEST, 38, hashed | files(tree), use)


@pytest.mark.parametrize(("name", "examples"), [("state.json", 25), ("config.yaml", 13)])
def test_any_state_or_config_of_a_checkpoint_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], name: str, examples: int, checkpoint: Path
) -> None:
    config = yaml.safe_load((checkpoint / "config.yaml").read_text())

    def use() -> None:
        generate(checkpoint, rehash=True)
        with time_limit(), contextlib.suppress(ValueError):
            read_state(read_state_file(checkpoint))

    contents = files(config if name == "config.yaml" else STATE)
    fuzz_file(checkpoint / name, examples, contents, use)


def test_any_weights_load_or_are_refused_in_one_line(
    fuzz: Callable[..., None], checkpoint: Path
) -> None:
    """Of other shapes, types and kinds, and damaged."""
    file = checkpoint / WEIGHTS
    intact, good = file.read_bytes(), torch.load(file)
    tensors = st.sampled_from(
        (
            *(torch.zeros(()), torch.zeros(3, dtype=torch.int64), torch.zeros(2**10, 2**10)),
            torch.zeros(1).expand(10**6, 10**6),
            *(torch.zeros(2, 2).to_sparse(), torch.zeros(3, device="meta"), torch.zeros(2) * 1j),
        )
    )
    anything = values().filter(lambda value: value != -(10**400))
    trees = st.one_of(
        st.tuples(st.sampled_from(sorted(good["module"])), tensors | anything).map(
            lambda pair: {"module": {**good["module"], pair[0]: pair[1]}}
        ),
        anything,
        mutated({"module": {"embed.weight": 1}}),
    )

    def check(tree: Any, cut: bytes | None) -> None:
        if cut is None:
            torch.save(tree, file)
        else:
            file.write_bytes(cut)
        generate(checkpoint, rehash=True)

    fuzz(check, 30, tree=trees, cut=st.none() | st.none() | damaged(intact))


@pytest.mark.parametrize("name", [MANIFEST, "state.json", "config.yaml", "rng_rank0.pt"])
def test_a_pipe_in_a_checkpoint_does_not_block(name: str, checkpoint: Path) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    if name != MANIFEST:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        del manifest["sha256"]
        manifest["files"][name]["bytes"] = 0  # a pipe's size
        (checkpoint / MANIFEST).write_text(manifest_text(manifest))
    assert generate(checkpoint) == 2
    assert run("generate", checkpoint, "--prompt=a") == 2


def test_a_folder_that_contains_itself_ends(checkpoint: Path) -> None:
    checkpoints = checkpoint.parent
    run_dir = checkpoints.parent
    shutil.rmtree(checkpoints)
    checkpoints.symlink_to(".")
    assert generate(checkpoint) == 2
    (run_dir / STEP).symlink_to(STEP)
    assert generate(checkpoint) == 2
    checkpoints.unlink()
    checkpoints.symlink_to("checkpoints")
    assert generate(checkpoint) == 2


CODE = (
    "import pathlib; pathlib.Path({!r}).touch()\nclass LlamaConfig: pass\nNSAConfig = LlamaConfig\n"
)
AUTO_MAP = {"AutoConfig": "configuration_evil.Evil", "AutoTokenizer": ["evil.Evil", None]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An export of this package, and a Llama saved by transformers."""
    root = tmp_path_factory.mktemp("exports")
    export(write_model(root / "run"), root / "nsa")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 259}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(root / "llama")
    return {"nsa": root / "nsa", "llama": root / "llama"}


@pytest.fixture
def folder(request: pytest.FixtureRequest, folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the export, or of the folder that the parameter names, and code beside it."""
    kind = getattr(request, "param", "nsa")
    folder = Path(shutil.copytree(folders[kind], tmp_path / "hostile"))
    for name in ("configuration_evil.py", "evil.py"):
        (folder / name).write_text(CODE.format(str(tmp_path / "ran")))
    return folder


def import_it(folder: Path) -> int:
    to = folder.with_name("to")
    code = run("import", folder, "--to", to, "--tokenizer", "byte")
    assert to.exists() == (code == 0), "complete or not at all"
    shutil.rmtree(to, ignore_errors=True)
    assert not folder.with_name("ran").exists()
    return code


def generate_from(folder: Path) -> None:
    run("generate", folder, "--prompt=a", "--max-new-tokens=1", exact_stdout=True)
    assert not folder.with_name("ran").exists()


@pytest.mark.parametrize("folder", ["nsa", "llama"], indirect=True)
def test_any_config_json_is_imported_or_refused_in_one_line(
    fuzz_file: Callable[..., None], folder: Path
) -> None:
    file = folder / "config.json"
    tree = json.loads(file.read_text()) | {"auto_map": AUTO_MAP}
    file.write_text(json.dumps(tree))
    assert import_it(folder) == 0
    fuzz_file(file, 15, files(tree), partial(import_it, folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.yaml"])
def test_any_tokenizer_or_settings_file_loads_or_is_refused_in_one_line(
    fuzz_file: Callable[..., None], name: str, folder: Path
) -> None:
    intact = (folder / name).read_bytes()
    contents = damaged(intact)
    if name != "config.yaml":
        contents = files(json.loads(intact) | ({"auto_map": AUTO_MAP} if "config" in name else {}))
    fuzz_file(folder / name, 8, contents, partial(generate_from, folder))


def test_any_safetensors_load_or_are_refused_in_one_line(
    fuzz: Callable[..., None], folder: Path
) -> None:
    """The header of safetensors is JSON; an index may name other files."""
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    intact = file.read_bytes()
    length = int.from_bytes(intact[:8], "little")
    header = json.loads(intact[8 : 8 + length])
    names = {"weight_map": dict.fromkeys(header, "a.safetensors")}

    def repack(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + intact[8 + length :]

    def check(content: bytes, listing: bytes, is_indexed: bool) -> None:
        file.write_bytes(content)
        index.write_bytes(listing)
        if is_indexed:
            file.replace(folder / "a.safetensors")
        generate_from(folder)

    contents = files(header).map(repack) | damaged(intact)
    fuzz(check, 30, content=contents, listing=files(names), is_indexed=st.booleans())


@pytest.mark.parametrize("name", ["config.json", "config.yaml", "tokenizer.json"])
def test_a_pipe_in_an_export_does_not_block(name: str, folder: Path) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    import_it(folder)
    generate_from(folder)
