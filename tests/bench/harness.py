"""What the benchmarks share: flags, timing, the results file, tables, intervals of means.

Times are those of `triton.testing.do_bench`: between GPU events, with a cold L2 cache, in ms. It
imports neither DeepSpeed nor YAML: GPU benchmarks run where only PyTorch and Triton are.
"""

import argparse
import gc
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from nsa.atomic_io import atomic_write_text
from nsa.dtypes import DTYPES
from nsa.monitor.environment import environment
from nsa.system import output_of
from nsa.text import align, type_and_message

Step = Callable[[], object]
Result = dict[str, Any]
T = TypeVar("T")
MIN_ROUNDS = 3  # on a CPU
# t with P(-t < T < t) = 95%, by degrees of freedom from 1 on; of more, the last is a little wide.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def words_of(*known: str) -> Callable[[str], list[str]]:
    """Return a parser of words separated by commas, for a flag that takes some of `known`."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"{word!r}: choose from {', '.join(known)}, separated by commas"
                )
        return words

    return parse


def lengths(text: str) -> list[int]:
    """Parse "1k,2k,500": token counts, k = 1,024."""
    names = text.split(",")
    for name in names:
        if re.fullmatch(r"[1-9]\d*k?", name) is None:
            raise argparse.ArgumentTypeError(f"{name!r} is not a length; use 500, or 8k for 8,192")
    return [int(n.rstrip("k")) * (1024 if n.endswith("k") else 1) for n in names]


def add_gpu_flags(parser: argparse.ArgumentParser, tokens: int = 65_536) -> None:
    """Add the flags of every GPU benchmark."""
    add = parser.add_argument
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: a GPU if present")
    add("--seconds", type=float, default=0.5, help="of each timing, about (%(default)s)")
    add("--limit", type=float, help="start no new case after this many seconds")
    add("--tokens", type=int, default=tokens, help="tokens in a case, at most (%(default)s)")


def time_step(step: Step, device: torch.device, seconds: float = 0.5, graph: bool = False) -> float:
    """Return the median milliseconds of a call, after calls to warm up.

    With `graph`, a GPU replays the call as a CUDA graph, which has no launch time on the host.
    """
    if device.type == "cuda":
        from triton import testing

        time_call = testing.do_bench_cudagraph if graph else testing.do_bench
        return time_call(step, rep=1e3 * seconds, return_mode="median")
    step()
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < MIN_ROUNDS or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


class Report:
    """Results of a benchmark, saved after every case.

    A time limit or a hanging kernel loses only the case that it interrupts.
    """

    def __init__(self, flags: argparse.Namespace, command: str = "") -> None:
        self.flags = flags
        settings = vars(flags).copy()
        self.on_gpu = torch.cuda.is_available() and settings.get("device") != "cpu"
        self.device = torch.device("cuda" if self.on_gpu else "cpu")
        dtype = "bf16" if self.on_gpu else "fp32"
        self.dtype = DTYPES[dtype]
        self.backend = "triton" if self.on_gpu else "blockwise"
        if "device" in settings:  # a GPU benchmark
            settings |= {"device": self.device.type, "dtype": dtype, "backend": self.backend}
        limit = settings.get("limit")
        self.end = math.inf if limit is None else time.monotonic() + limit
        self.data: dict[str, Any] = {
            "environment": environment() | {"command": command, "nvidia_smi": nvidia_smi()},
            "settings": settings,
            "finished": False,
            "rows": [],
            "skipped": [],
        }
        self._allocated = 0  # bytes on the GPU before an implementation was built
        torch.manual_seed(0)
        self.save()

    def save(self) -> None:
        """Write the results to --out, if given."""
        if self.flags.out is not None:
            text = json.dumps(self.data, indent=1, ensure_ascii=False, default=str)
            atomic_write_text(self.flags.out, text + "\n")

    def add(self, row: Mapping[str, Any]) -> None:
        self.data["rows"].append(dict(row))
        self.save()

    def attempt(self, case: str, run: Callable[[], None]) -> None:
        """Run one case; list it under `skipped` if it fails or the time limit is over."""
        if time.monotonic() >= self.end:
            reason = f"--limit {self.flags.limit:g} s over"
        else:
            try:
                return run()
            except Exception as error:  # one case, such as one too large, must not end the others
                reason = self._recover(error)
        self.data["skipped"].append({"case": case, "reason": reason})
        self.save()
        print(f"{case} NOT MEASURED: {reason}", flush=True)

    def compare(
        self,
        row: Mapping[str, Any],
        builders: Mapping[str, Callable[[], T]],
        figures: Sequence[str],
        measure: Callable[[str, T, Result], None],
        base: str,
    ) -> None:
        """Build and measure each implementation of a case; add them to its row, and print them.

        An error ends the implementation's figures, is listed beside them, and ends no other's.
        Ratios are those of a figure to that of `base`, if it is among them.
        """
        results: dict[str, Result] = {}
        for name, build in builders.items():
            result = results[name] = {**dict.fromkeys(figures), "errors": {}}
            self._allocated = torch.cuda.memory_allocated(self.device) if self.on_gpu else 0
            try:
                measure(name, build(), result)
            except Exception as error:
                result["errors"]["all"] = self._recover(error)
        ratios = {
            name: {what: ratio(result[what], results[base][what]) for what in figures}
            for name, result in results.items()
            if base in results and name != base
        }
        self.add({**row, "implementations": results, "ratios": ratios})
        title = " ".join(f"{name} {value}" for name, value in row.items())
        cells = [[name, *(cell(x[what]) for what in figures)] for name, x in results.items()]
        print(title)
        print_table([["", *figures], *cells])
        for name, result in results.items():
            for error in result["errors"].values():
                print(f"  {name}: {error}")
        for name, quotients in ratios.items():
            shown = ", ".join(f"{what} {cell(x)}" for what, x in quotients.items())
            print(f"  {name} over {base}: {shown}", flush=True)

    def peak_bytes(self, step: Step) -> int | None:
        """Return the peak memory of a step of an implementation, less what the case holds.

        None on a CPU, where PyTorch counts nothing.
        """
        if not self.on_gpu:
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        step()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - self._allocated

    def _recover(self, error: Exception) -> str:
        """Free what a failed step left allocated and return its error as one line."""
        error.__traceback__ = None  # its frames hold the step's tensors
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        return type_and_message(error)[:400]

    def finish(self) -> None:
        """Mark the results as complete, unless a case was skipped, and save."""
        self.data["finished"] = not self.data["skipped"]
        self.save()


def nvidia_smi() -> dict[str, str]:
    """Return the first GPU's driver, clocks, power and temperature; {} without nvidia-smi."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    query = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")
    return dict(zip(fields.split(","), query.strip().split(", "), strict=False)) if query else {}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient of two figures; None if one is missing."""
    return None if numerator is None or not denominator else numerator / denominator


def cell(value: float | None) -> str:
    """Return a figure as text for a table; a dash for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def print_table(rows: Sequence[Sequence[str]]) -> None:
    print(*align(rows), "", sep="\n", flush=True)


def margin(values: Sequence[float]) -> float:
    """Return half of the mean's 95% confidence interval, by Student's t; 0 for one value."""
    if len(values) < 2:
        return 0.0
    degrees = min(len(values) - 1, len(T_95))
    return T_95[degrees - 1] * statistics.stdev(values) / math.sqrt(len(values))
