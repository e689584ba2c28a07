"""`python -m nsa.bench comm`: what each DeepSpeed config sends, and what that costs a step.

Two ranks in two network namespaces, joined by a link that is throttled, take real steps under each
config. Two more take the same steps with collectives that return at once: what a step computes.
What is left is exposed communication. Where there are two GPUs the ranks take those, and NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from nsa.bench import comm_report
from nsa.bench.netns import INTERFACE, Link, LinkError, link
from nsa.resources import resource_path

CONFIGS = resource_path("ds_configs")
MODEL: dict[str, Any] = {  # sending its gradients takes about as long as computing, at 1 Gbit/s
    "vocab_size": 320,
    "layers": 4,
    "width": 384,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "mlp_width": 1024,
    "activation_checkpointing": "reentrant",
    "spec": {
        "block_len": 16,
        "block_stride": 8,
        "select_len": 32,
        "select_top": 6,
        "window": 64,
    },
}
TOKENS = 64  # of a micro-batch
REDUCE_DTYPES = ("bf16", "fp32")
GPU_MODEL: dict[str, Any] = {"activation_checkpointing": "reentrant", "spec": {}}  # M7C
GPU_TOKENS = 2_048
GPU_WAYS = {"P2P": {}, "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"}}
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # addresses without names are no news here
RANKS = 2
RATES = (1.0, 4.0, None)  # Gbit/s; None: as fast as the machine can
ACCUMULATIONS = (1, 2, 8)
ELEMENTS, COLLECTIVES = 2**23, 9  # of a collective that is timed by itself, and how often
WARMUP = 2  # steps that pay for memory, before any is timed
MICRO_BATCHES, FEWEST = 10, 3  # that are timed at each rate; but never fewer steps
_BUCKETED: tuple[dict[str, Any], ...] = (
    {},
    {"reduce_bucket_size": 2**18},
    {"reduce_bucket_size": 2**20},
    {"use_multi_rank_bucket_allreduce": False},
    {"use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 2**20},
)
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {  # changes of zero_optimization
    "zero1_bf16acc": _BUCKETED,
    "zero2_pcie": _BUCKETED,
    "zero3": ({}, {"stage3_param_persistence_threshold": 2**30}),  # no weight is sharded
}


@dataclass(frozen=True)
class Case:
    """One engine to measure: a file of ds_configs/, and what is set beside it."""

    config: str
    accumulation: int
    reduce_dtype: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of zero_optimization

    def ds_config(self) -> dict[str, Any]:
        """The JSON that DeepSpeed gets, but for what the recipe owns."""
        raw: dict[str, Any] = json.loads((CONFIGS / f"{self.config}.json").read_text())
        raw["communication_data_type"] = self.reduce_dtype
        raw["zero_optimization"] |= self.changes
        return raw


def cases(names: Sequence[str], accumulations: Sequence[int]) -> list[Case]:
    """Every config, accumulation and reduction dtype."""
    return [Case(n, a, r) for r in REDUCE_DTYPES for n in names for a in accumulations]


def variants(names: Sequence[str], accumulations: Sequence[int]) -> list[Case]:
    """Those configs that have a choice, as they are and with each change."""
    return [
        Case(name, accumulation, "bf16", changes)
        for name in VARIANTS
        if name in names
        for accumulation in accumulations
        for changes in VARIANTS[name]
    ]


class Pair:
    """Two ranks that carry out orders together; `made`: the link that joins them, if one does."""

    def __init__(
        self, backend: str, made: Link | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        place = {
            "backend": backend,
            "interface": INTERFACE if made else "",
            "address": made.addresses[0] if made else "127.0.0.1",
            "port": 29_500 if made else _free_port(),
            "threads": max(1, (os.cpu_count() or 1) // RANKS),
        }
        self._ranks: list[subprocess.Popen[str]] = []
        self._answers: list[TextIO] = []
        for rank in range(RANKS):
            answers, end = os.pipe()  # its own: libraries print to stdout
            told = json.dumps({"rank": rank, "answers": end} | place)
            words = [sys.executable, "-m", "nsa.bench.comm_ranks", told]
            started = subprocess.Popen(
                [*(made.inside(rank) if made else []), *words],
                env={**os.environ, **QUIET, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=[end],
                start_new_session=True,
                text=True,
            )
            os.close(end)
            self._ranks.append(started)
            self._answers.append(os.fdopen(answers))

    def ask(self, do: str, **order: Any) -> list[dict[str, Any]]:
        """Give both the same order; what each answers."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps({"do": do, **order}) + "\n")
            rank.stdin.flush()
        lines = [answers.readline() for answers in self._answers]
        if not all(lines):
            raise RuntimeError(f"a rank ended that was told to {do}; its last words are above")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """No more orders: the ranks end by themselves, or are ended."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            try:
                rank.wait(10)
            except subprocess.TimeoutExpired:
                rank.kill()
                rank.wait()


@dataclass
class Bench:
    """The ranks, and the settings of the link that each case is measured at."""

    pairs: dict[str, Pair]  # by what the row calls the way: "veth", or how NCCL goes
    alone: Pair | None  # whose collectives return at once
    rates: Sequence[float | None]
    throttle: Callable[[float | None], None]
    model: Mapping[str, Any]
    tokens: int

    def collectives(self) -> list[dict[str, Any]]:
        """How long the two collectives take by themselves, over each link."""
        found = []
        for way, pair in self.pairs.items():
            for rate in self.rates:
                self.throttle(rate)
                for name in ("all_reduce", "all_gather"):
                    order = {"name": name, "elements": ELEMENTS, "count": 1 + COLLECTIVES}
                    taken = pair.ask("collective", **order)[0]["seconds"][1:]
                    row = {"name": name, "bf16_elements": ELEMENTS, "way": way, "rate_gbit": rate}
                    found.append(row | {"seconds": round(statistics.median(taken), 5)})
        return found

    def measure(self, case: Case) -> Iterator[dict[str, Any]]:
        """A row for each way and rate. Steps that only compute are taken in between, so that a
        slow minute of a shared machine hits both."""
        order = {
            "model": self.model,
            "tokens": self.tokens,
            "accumulation": case.accumulation,
            "ds_config": case.ds_config(),
        }
        everyone = [*self.pairs.values(), *([self.alone] if self.alone else [])]
        for pair in everyone:
            parameters = pair.ask("build", **order)[0]["parameters"]
        steps = max(FEWEST, MICRO_BATCHES // case.accumulation)
        self.throttle(None)
        for pair in everyone:
            pair.ask("steps", count=WARMUP)
        found, computing = [], []
        for way, pair in self.pairs.items():
            payload = pair.ask("payload")[0]
            for rate in self.rates:
                self.throttle(rate)
                idle = pair.ask("steps", count=0)[0]["bytes"]
                answer = pair.ask("steps", count=steps)[0]
                sent = (answer["bytes"] - idle) / steps
                found.append((way, rate, sent, payload, answer["seconds"]))
                if self.alone:
                    computing += self.alone.ask("steps", count=-(-steps // 2))[0]["seconds"]
        for way, rate, sent, payload, seconds in found:
            row = _row(case, parameters, way, rate, sent or payload["bytes"], seconds, computing)
            row["parameters"] = parameters
            row["payload_bytes_per_parameter_per_step"] = round(payload["bytes"] / parameters, 4)
            yield row


def _row(
    case: Case,
    parameters: int,
    way: str,
    rate: float | None,
    sent: float,
    seconds: list[float],
    computing: list[float],
) -> dict[str, Any]:
    step = statistics.median(seconds)
    row = asdict(case) | {
        "stage": case.ds_config()["zero_optimization"]["stage"],
        "way": way,
        "rate_gbit": rate,
        "bytes_per_parameter_per_step": round(sent / parameters, 4),
        "step_seconds": round(step, 4),
        "step_seconds_all": [round(second, 4) for second in seconds],
    }
    if computing:
        compute = statistics.median(computing)
        row |= {
            "compute_seconds": round(compute, 4),
            "exposed_seconds": round(step - compute, 4),
        }
        if rate is not None:
            wire = sent * 8 / rate / 1e9
            hidden = min(1.0, max(0.0, 1 - (step - compute) / wire))
            row |= {"wire_seconds": round(wire, 4), "hidden_share": round(hidden, 3)}
    return row


@contextmanager
def throttled(
    rates: Sequence[float | None],
    *,
    model: Mapping[str, Any] = MODEL,
    tokens: int = TOKENS,
    compute: bool = True,
) -> Iterator[Bench]:
    """Two ranks on processors, in two namespaces."""
    with ExitStack() as stack:
        made = stack.enter_context(link())
        pair = stack.enter_context(_pair("gloo", made))
        alone = stack.enter_context(_pair("fake")) if compute else None
        yield Bench({"veth": pair}, alone, rates, made.throttle, model, tokens)


@contextmanager
def between_gpus() -> Iterator[Bench]:
    """Two ranks on two GPUs, which reach each other in every way that NCCL can be told to take."""
    with ExitStack() as stack:
        pairs = {
            way: stack.enter_context(_pair("nccl", environment=settings))
            for way, settings in GPU_WAYS.items()
        }
        alone = stack.enter_context(_pair("fake"))
        yield Bench(pairs, alone, [None], lambda rate: None, GPU_MODEL, GPU_TOKENS)


def run(flags: argparse.Namespace) -> None:
    """Measure every case; what has been measured is on disk after each one.

    Ends with exit code 2 and a line that says what is missing where nothing can be measured.
    """
    if flags.show is not None:
        print(comm_report.measured_columns(json.loads(flags.show.read_text())), end="")
        return
    names = flags.config or sorted(path.stem for path in CONFIGS.glob("*.json"))
    chosen = (variants if flags.variants else cases)(names, flags.accumulation)
    gpus = _gpus()
    try:
        with between_gpus() if gpus >= RANKS else throttled(flags.rates) as bench:
            _measure(bench, chosen, _about(gpus), flags.out)
    except LinkError as error:
        print(
            f"comm needs two GPUs, or root on Linux with ip and tc (iproute2): {error}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def _measure(
    bench: Bench, chosen: Sequence[Case], about: Mapping[str, Any], out: Path | None
) -> None:
    rows: list[dict[str, Any]] = []
    model = {"model": bench.model, "tokens_per_micro_batch": bench.tokens}
    model["collectives"] = bench.collectives()
    for case in chosen:
        for row in bench.measure(case):
            parameters = {"parameters": row.pop("parameters")}
            rows.append(row)
            comm_report.print_row(row)
        if out is not None:
            comm_report.write({**about, **parameters, **model, "rows": rows}, out)


def _about(gpus: int) -> dict[str, Any]:
    """Where, when, by what command and with which versions it was measured."""
    from nsa.bench.measure import environment

    here = environment()
    hardware = f"{os.cpu_count()} processors ({here['processor']})"
    if gpus:
        import torch

        hardware = f"{gpus} × {torch.cuda.get_device_name(0)}"
    return {
        "hardware": hardware,
        "link": "NCCL" if gpus >= RANKS else "gloo over a veth pair between two network namespaces",
        "versions": {name: version(name) for name in ("torch", "deepspeed")},
        "command": here["command"],
        "date": here["date"],
        "ranks": RANKS,
    }


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


@contextmanager
def _pair(
    backend: str, made: Link | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Pair]:
    pair = Pair(backend, made, environment)
    try:
        yield pair
    finally:
        pair.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
