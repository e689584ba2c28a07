"""`python -m tests.bench comm`: what each DeepSpeed config sends, and what that costs a step.

Two ranks in two network namespaces, joined by a throttled link, take real steps under each config.
Two more take the same steps with collectives that return at once, which leaves the compute time.
The difference is exposed communication.
"""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nsa.system import resource_path
from nsa.text import markdown_table
from tests.bench.harness import Report
from tests.fork_server import PRELOADED
from tests.netns import RANKS, Link, link
from tests.ranks import free_port

CONFIGS = {path.stem: path for path in sorted(resource_path("ds_configs").glob("*.json"))}
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
# Gbit/s of the link; the table has the first, which shows communication best. None: not throttled
RATES = (1.0, 4.0, None)
COLLECTIVE_ELEMENTS, COLLECTIVE_ROUNDS = 2**23, 9  # of each collective that is timed alone
WARMUP_STEPS = 2
MICRO_BATCHES, MIN_STEPS = 10, 3  # timed at each rate

Row = dict[str, Any]


class RankPair:
    """Two rank processes (comm_ranks.py) that carry out the same requests."""

    def __init__(self, backend: str, link: Link | None = None) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns about missing host names
        address = link.addresses[0] if link else "127.0.0.1", 29_500 if link else free_port()
        context = get_context("forkserver")  # which imports DeepSpeed once for all ranks
        context.set_forkserver_preload(["tests.bench.comm_ranks", *PRELOADED])
        self._ranks = [
            ProcessPoolExecutor(1, context, _start_rank, (rank, backend, link, address))
            for rank in range(RANKS)
        ]

    def request(self, action: str, *arguments: Any) -> Any:
        """Have both ranks call a method of comm_ranks.Rank; return rank 0's result."""
        calls = [rank.submit(_call, action, arguments) for rank in self._ranks]
        for call in as_completed(calls):
            call.result()  # the first error ends the benchmark, whatever the other rank waits for
        return calls[0].result()

    def close(self) -> None:
        for rank in self._ranks:
            rank.shutdown(wait=False)


def _start_rank(rank: int, backend: str, link: Link | None, address: tuple[str, int]) -> None:
    global _this_rank
    os.setsid()  # Ctrl-C is for the benchmark, which then ends its ranks
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries print there
    gc.freeze()  # DeepSpeed collects garbage often: half a second with all imported modules
    if link:
        link.enter(rank)
    from tests.bench.comm_ranks import Rank, join  # late: it imports DeepSpeed

    _this_rank = Rank(join(rank, RANKS, backend, address))


_this_rank: Any  # the comm_ranks.Rank of a rank's process


def _call(action: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_this_rank, action)(*arguments)


class Bench:
    """Ranks that communicate, ranks that only compute, and the link's rates to measure."""

    def __init__(
        self, link: Link, rates: Sequence[float | None], model: Mapping[str, Any], tokens: int
    ) -> None:
        self.link, self.rates, self.model, self.tokens = link, rates, model, tokens
        self.pair = RankPair("gloo", link)
        self.compute_only = RankPair("fake")  # its collectives return at once

    def close(self) -> None:
        self.pair.close()
        self.compute_only.close()

    def collectives(self) -> list[Row]:
        """Time each collective alone, at each rate."""
        rows = []
        for rate in self.rates:
            self.link.throttle(rate)
            for name in ("all_reduce", "all_gather"):
                arguments = name, COLLECTIVE_ELEMENTS, 1 + COLLECTIVE_ROUNDS
                _, *seconds = self.pair.request("collective", *arguments)
                row = {"name": name, "bf16_elements": COLLECTIVE_ELEMENTS, "rate_gbit": rate}
                rows.append(row | {"seconds": round(statistics.median(seconds), 5)})
        return rows

    def measure(self, config: str, accumulation: int, reduce_dtype: str) -> Iterator[Row]:
        """Yield a row per rate, of a file of ds_configs/.

        Compute-only steps alternate with the others, so that a slow minute of a shared machine
        affects both.
        """
        ds_config: dict[str, Any] = json.loads(CONFIGS[config].read_text())
        ds_config["communication_data_type"] = reduce_dtype
        self.link.throttle(None)
        for pair in (self.pair, self.compute_only):
            parameters = pair.request("build", self.model, self.tokens, accumulation, ds_config)
            pair.request("steps", WARMUP_STEPS)
        payload = self.pair.request("payload")
        steps = max(MIN_STEPS, MICRO_BATCHES // accumulation)
        measured, compute = [], []
        for rate in self.rates:
            self.link.throttle(rate)
            _, idle = self.pair.request("steps", 0)
            seconds, sent = self.pair.request("steps", steps)
            measured.append((rate, (sent - idle) / steps, seconds))
            compute += self.compute_only.request("steps", -(-steps // 2))[0]
        alone = statistics.median(compute)
        for rate, sent, seconds in measured:
            step = statistics.median(seconds)
            yield {
                "config": config,
                "accumulation": accumulation,
                "reduce_dtype": reduce_dtype,
                "stage": ds_config["zero_optimization"]["stage"],
                "rate_gbit": rate,
                "parameters": parameters,
                "bytes_per_parameter_per_step": round(sent / parameters, 4),
                "payload_bytes_per_parameter_per_step": round(payload / parameters, 4),
                "step_seconds_all": [round(second, 4) for second in seconds],
                "step_seconds": round(step, 4),
                "compute_seconds": round(alone, 4),
                "exposed_seconds": round(step - alone, 4),
            }


def add_flags(parser: argparse.ArgumentParser) -> None:
    add, every = parser.add_argument, list(CONFIGS)
    add("--config", nargs="+", choices=every, default=every, help="of ds_configs/; default: all")
    add("--accumulation", type=int, nargs="+", default=[1, 2, 8], help="micro-batches per step")
    add("--show", type=Path, help="only print the table of configs of this file")


def run(report: Report) -> None:
    """Measure every case; print and save each row."""
    flags = report.flags
    if flags.show is not None:
        print("\n".join(config_table(json.loads(flags.show.read_text())["rows"])))
        return
    with link() as veth, closing(Bench(veth, RATES, MODEL, TOKENS)) as bench:
        report.data |= {
            "link": "veth pair of two network namespaces, gloo",
            "ranks": RANKS,
            "model": bench.model,
            "tokens_per_micro_batch": bench.tokens,
            "collectives": bench.collectives(),
        }
        for reduce_dtype, config, accumulation in product(
            ("bf16", "fp32"), flags.config, flags.accumulation
        ):
            for row in bench.measure(config, accumulation, reduce_dtype):
                report.data["parameters"] = row.pop("parameters")
                report.add(row)
                print(row, flush=True)


def config_table(rows: Sequence[Row]) -> list[str]:
    """Return the page's table: bytes, milliseconds and exposed fraction, by accumulation."""
    by_case = {
        (row["config"], row["accumulation"]): row
        for row in rows
        if row["reduce_dtype"] == "bf16" and row["rate_gbit"] == RATES[0]
    }
    accumulations = sorted({accumulation for _, accumulation in by_case})
    first, *others = map(str, accumulations)
    heads = [x for what in ("bytes", "ms", "exposed") for x in (f"{what}, {first}", *others)]
    lines = []
    for config in dict.fromkeys(config for config, _ in by_case):
        cases = [by_case[config, a] for a in accumulations]
        sent = [f"{row['bytes_per_parameter_per_step']:.2f}" for row in cases]
        ms = [f"{1e3 * row['step_seconds']:.0f}" for row in cases]
        exposed = [max(0.0, row["exposed_seconds"]) / row["step_seconds"] for row in cases]
        lines.append([f"`{config}`", *sent, *ms, *(f"{fraction:.0%}" for fraction in exposed)])
    return markdown_table(["config", *heads], lines)
