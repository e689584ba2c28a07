"""`python -m nsa.bench comm`: what each DeepSpeed config sends, and what that costs a step.

Two ranks in two network namespaces, joined by a throttled link, take real steps under each config.
Two more take the same steps with collectives that return at once, which leaves the compute time.
The difference is exposed communication. With two GPUs, the ranks use those and NCCL.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from nsa.bench import comm_report
from nsa.bench.comm_pair import RANKS, RankPair, rank_pair
from nsa.bench.environment import environment
from nsa.bench.netns import LinkError, link
from nsa.bench.results import save
from nsa.resources import resource_path

CONFIGS = resource_path("ds_configs")
MODEL: dict[str, Any] = {  # at 1 Gbit/s, sending its gradients takes about as long as computing
    "vocab_size": 320,
    "layers": 4,
    "width": 384,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 64,
    "mlp_width": 1024,
    "activation_checkpointing": "reentrant",
    "spec": {"block_len": 16, "block_stride": 8, "select_len": 32, "select_top": 6, "window": 64},
}
TOKENS = 64  # per micro-batch
GPU_MODEL: dict[str, Any] = {"activation_checkpointing": "reentrant", "spec": {}}  # M7C
GPU_TOKENS = 2_048
GPU_TRANSPORTS = {"P2P": {}, "NCCL_P2P_DISABLE=1": {"NCCL_P2P_DISABLE": "1"}}
ELEMENTS, COLLECTIVES = 2**23, 9  # of a collective timed alone, and its repetitions
WARMUP_STEPS = 2
MICRO_BATCHES, MIN_STEPS = 10, 3  # timed at each rate
_BUCKETS: tuple[dict[str, Any], ...] = (
    {},
    {"reduce_bucket_size": 2**18},
    {"reduce_bucket_size": 2**20},
    {"use_multi_rank_bucket_allreduce": False},
    {"use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 2**20},
)
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {  # changes of zero_optimization
    "zero1_bf16acc": _BUCKETS,
    "zero2_pcie": _BUCKETS,
    "zero3": ({}, {"stage3_param_persistence_threshold": 2**30}),  # no parameter is sharded
}


@dataclass(frozen=True)
class Case:
    """One engine to measure: a file of ds_configs/ and changes of it."""

    config: str
    accumulation: int
    reduce_dtype: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of zero_optimization

    def ds_config(self) -> dict[str, Any]:
        """DeepSpeed's JSON, without what the recipe owns."""
        raw: dict[str, Any] = json.loads((CONFIGS / f"{self.config}.json").read_text())
        raw["communication_data_type"] = self.reduce_dtype
        raw["zero_optimization"] |= self.changes
        return raw


def cases(names: Sequence[str], accumulations: Sequence[int], variants: bool) -> list[Case]:
    """Every config, accumulation and reduction dtype; or VARIANTS with each of their changes."""
    if not variants:
        return [Case(n, a, r) for r in ("bf16", "fp32") for n in names for a in accumulations]
    return [
        Case(name, accumulation, "bf16", changes)
        for name in VARIANTS
        if name in names
        for accumulation in accumulations
        for changes in VARIANTS[name]
    ]


@dataclass
class Bench:
    """The pairs of ranks, and the link rates to measure each case at."""

    pairs: dict[str, RankPair]  # by transport: "veth", or how NCCL sends
    compute_only: RankPair | None  # its collectives return at once
    rates: Sequence[float | None]
    throttle: Callable[[float | None], None]
    model: Mapping[str, Any]
    tokens: int

    def collectives(self) -> list[dict[str, Any]]:
        """Seconds of each collective alone, over each link."""
        rows = []
        for transport, pair in self.pairs.items():
            for rate in self.rates:
                self.throttle(rate)
                for name in ("all_reduce", "all_gather"):
                    options = {"name": name, "elements": ELEMENTS, "count": 1 + COLLECTIVES}
                    seconds = pair.request("collective", **options)["seconds"][1:]
                    row = {"name": name, "bf16_elements": ELEMENTS, "transport": transport}
                    median = round(statistics.median(seconds), 5)
                    rows.append(row | {"rate_gbit": rate, "seconds": median})
        return rows

    def measure(self, case: Case) -> Iterator[dict[str, Any]]:
        """A row per transport and rate. Compute-only steps alternate with the others, so that a
        slow minute of a shared machine affects both."""
        every = [*self.pairs.values(), *([self.compute_only] if self.compute_only else [])]
        for pair in every:
            parameters = pair.request(
                "build",
                model=self.model,
                tokens=self.tokens,
                accumulation=case.accumulation,
                ds_config=case.ds_config(),
            )["parameters"]
        steps = max(MIN_STEPS, MICRO_BATCHES // case.accumulation)
        self.throttle(None)
        for pair in every:
            pair.request("steps", count=WARMUP_STEPS)
        measured, compute = [], []
        for transport, pair in self.pairs.items():
            payload = pair.request("payload")["bytes"]
            for rate in self.rates:
                self.throttle(rate)
                idle = pair.request("steps", count=0)["bytes"]
                reply = pair.request("steps", count=steps)
                sent = (reply["bytes"] - idle) / steps
                measured.append((transport, rate, sent or payload, payload, reply["seconds"]))
                if self.compute_only:
                    half = -(-steps // 2)
                    compute += self.compute_only.request("steps", count=half)["seconds"]
        for transport, rate, sent, payload, seconds in measured:
            yield {
                **asdict(case),
                "stage": case.ds_config()["zero_optimization"]["stage"],
                "transport": transport,
                "rate_gbit": rate,
                "parameters": parameters,
                "bytes_per_parameter_per_step": round(sent / parameters, 4),
                "payload_bytes_per_parameter_per_step": round(payload / parameters, 4),
                "step_seconds_all": [round(second, 4) for second in seconds],
                **_times(statistics.median(seconds), compute, sent, rate),
            }


def _times(
    step: float, compute_all: Sequence[float], sent: float, rate: float | None
) -> dict[str, float]:
    """Seconds of a step, and what of it is compute, exposed and hidden communication."""
    row = {"step_seconds": round(step, 4)}
    if compute_all:
        compute = statistics.median(compute_all)
        exposed = step - compute
        row |= {"compute_seconds": round(compute, 4), "exposed_seconds": round(exposed, 4)}
        if rate is not None:
            wire = sent * 8 / rate / 1e9
            hidden = min(1.0, max(0.0, 1 - exposed / wire))
            row |= {"wire_seconds": round(wire, 4), "hidden_fraction": round(hidden, 3)}
    return row


@contextmanager
def throttled(
    rates: Sequence[float | None],
    *,
    model: Mapping[str, Any] = MODEL,
    tokens: int = TOKENS,
    compute: bool = True,
) -> Iterator[Bench]:
    """Two CPU ranks in two network namespaces."""
    with ExitStack() as stack:
        veth = stack.enter_context(link())
        pair = stack.enter_context(rank_pair("gloo", veth))
        compute_only = stack.enter_context(rank_pair("fake")) if compute else None
        yield Bench({"veth": pair}, compute_only, rates, veth.throttle, model, tokens)


@contextmanager
def between_gpus() -> Iterator[Bench]:
    """Two ranks on two GPUs, over each of NCCL's transports."""
    with ExitStack() as stack:
        pairs = {
            transport: stack.enter_context(rank_pair("nccl", env=settings))
            for transport, settings in GPU_TRANSPORTS.items()
        }
        compute_only = stack.enter_context(rank_pair("fake"))
        yield Bench(pairs, compute_only, [None], lambda rate: None, GPU_MODEL, GPU_TOKENS)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", nargs="+", help="names in ds_configs/; default: all")
    parser.add_argument("--rates", type=_rates, default="1,4,full", help="Gbit/s (%(default)s)")
    parser.add_argument(
        "--accumulation", type=int, nargs="+", default=[1, 2, 8], help="micro-batches per step"
    )
    parser.add_argument(
        "--variants", action="store_true", help="measure other buckets and owners instead"
    )
    parser.add_argument("--out", type=Path, help="save as JSON there")
    parser.add_argument("--show", type=Path, help="only print the table of configs of this file")


def _rates(text: str) -> list[float | None]:
    """Comma-separated Gbit/s; `full` is unthrottled."""
    rates = [None if word == "full" else float(word) for word in text.split(",")]
    if any(rate is not None and rate <= 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: write Gbit/s above 0, or full")
    return rates


def run(flags: argparse.Namespace) -> None:
    """Measure every case and save after each one.

    Exit with code 2 and a line on stderr where nothing can be measured.
    """
    if flags.show is not None:
        print(comm_report.measured_columns(json.loads(flags.show.read_text())), end="")
        return
    names = flags.config or sorted(path.stem for path in CONFIGS.glob("*.json"))
    gpus = torch.cuda.device_count()
    try:
        with between_gpus() if gpus >= RANKS else throttled(flags.rates) as bench:
            header = _header(flags.arguments, gpus) | {
                "model": bench.model,
                "tokens_per_micro_batch": bench.tokens,
                "collectives": bench.collectives(),
            }
            rows: list[dict[str, Any]] = []
            for case in cases(names, flags.accumulation, flags.variants):
                for row in bench.measure(case):
                    header["parameters"] = row.pop("parameters")
                    rows.append(row)
                    comm_report.print_row(row)
                if flags.out is not None:
                    save(flags.out, {**header, "rows": rows})
    except LinkError as error:
        print(
            f"comm needs two GPUs, or root on Linux with ip and tc (iproute2): {error}",
            file=sys.stderr,
        )
        raise SystemExit(2) from None


def _header(arguments: Sequence[str], gpus: int) -> dict[str, Any]:
    env = environment(arguments)
    hardware = f"{os.cpu_count()} CPU cores ({env['processor']})"
    if gpus:
        hardware = f"{gpus} × {torch.cuda.get_device_name(0)}"
    return {
        "hardware": hardware,
        "link": "NCCL" if gpus >= RANKS else "gloo over a veth pair between two network namespaces",
        "versions": {name: version(name) for name in ("torch", "deepspeed")},
        "command": env["command"],
        "date": env["date"],
        "ranks": RANKS,
    }
