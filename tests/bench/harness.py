"""What the benchmarks share: flags and head shapes, timing, the results file, intervals of means.

Times are those of `triton.testing.do_bench`: between GPU events, with a cold L2 cache, in ms. It
imports neither DeepSpeed nor YAML: GPU benchmarks run where only PyTorch and Triton are.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa.atomic_io import atomic_write_text
from nsa.dtypes import DTYPES
from nsa.monitor.environment import cpu_model
from nsa.ops.triton.configs import amd_chip
from nsa.ops.tune import Heads, parse_heads
from nsa.system import output_of, package_version

Step = Callable[[], object]
Result = dict[str, Any]
T = TypeVar("T")
MIN_ROUNDS = 3  # on a CPU
# t with P(-t < T < t) = 95%, by degrees of freedom from 1 on; of more, the last is a little wide.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


SHAPES = {"m7c": Heads(12, 2, 64, 64), "64x4x128": Heads(64, 4, 128, 128)}


def add_seeds(parser: argparse.ArgumentParser) -> None:
    """Add --seeds of an experiment."""
    about = "of weights and data (1 2 3)"
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help=about)


def words(text: str) -> list[str]:
    """Parse words separated by commas, without duplicates."""
    return list(dict.fromkeys(word for word in text.split(",") if word))


def words_of(*known: str) -> Callable[[str], list[str]]:
    """Return a parser of words separated by commas, for a flag that takes some of `known`."""

    def parse(text: str) -> list[str]:
        for word in words(text):
            if word not in known:
                raise argparse.ArgumentTypeError(
                    f"{word!r}: choose from {', '.join(known)}, separated by commas"
                )
        return words(text)

    return parse


def shapes(text: str) -> dict[str, Heads]:
    """Parse "m7c,64x4x128": names, or heads x KV heads x key size [x value size]."""
    try:
        return {name: SHAPES.get(name) or parse_heads(name) for name in words(text)}
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--tune ")) from error


def lengths(text: str) -> list[int]:
    """Parse "1k,2k,500": token counts, k = 1,024."""
    for name in words(text):
        if re.fullmatch(r"[1-9]\d*k?", name) is None:
            raise argparse.ArgumentTypeError(f"{name!r} is not a length; use 500, or 8k for 8,192")
    return [int(n.rstrip("k")) * (1024 if n.endswith("k") else 1) for n in words(text)]


def add_gpu_flags(
    parser: argparse.ArgumentParser,
    lengths_default: str = "",
    *,
    shapes_default: str = "",
    tokens: int = 65_536,
    tokens_help: str = "tokens per batch, about (%(default)s)",
) -> None:
    """Add a GPU benchmark's flags; with lengths also head shapes, or else a model's size."""
    add = parser.add_argument
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: a GPU if present")
    add("--dtype", choices=tuple(DTYPES), help="default: bf16, on a CPU fp32")
    add("--seconds", type=float, default=0.5, help="of each timing, about (%(default)s)")
    add("--limit", type=float, help="start no new case after this many seconds")
    if shapes_default:
        about = "m7c, or heads x KV heads x key size [x value size] (%(default)s)"
        add("--shapes", type=shapes, default=shapes_default, help=about)
    elif lengths_default:
        add("--layers", type=int, default=12, help="transformer blocks")
        add("--vocab", type=int, default=50_304, help="rows of the embedding")
    if lengths_default:
        about = "sequence lengths (%(default)s)"
        add("--lengths", type=lengths, default=lengths_default, help=about)
    add("--tokens", type=int, default=tokens, help=tokens_help)
    about = "NSA's backend; default: triton on a GPU, blockwise on a CPU"
    add("--backend", choices=("auto", "triton", "blockwise", "reference"), help=about)


def time_step(
    step: Step, device: torch.device, seconds: float = 0.5, graph: bool = False
) -> Result:
    """Return the median, least and largest milliseconds of a call, after calls to warm up.

    With `graph`, a GPU replays the call as a CUDA graph, which has no launch time on the host.
    """
    if device.type == "cuda":
        from triton import testing

        time_call = testing.do_bench_cudagraph if graph else testing.do_bench
        times = time_call(step, rep=1e3 * seconds, return_mode="all")
    else:
        step()
        times, end = [], time.perf_counter() + seconds
        while len(times) < MIN_ROUNDS or time.perf_counter() < end:
            start = time.perf_counter()
            step()
            times.append((time.perf_counter() - start) * 1e3)
    low, high = min(times), max(times)
    return {"median": statistics.median(times), "low": low, "high": high, "rounds": len(times)}


def recover(error: Exception, device: torch.device) -> str:
    """Free what a failed step left allocated and return its error as one line."""
    error.__traceback__ = None  # its frames hold the step's tensors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; return at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(step: Step, held: Iterable[Tensor], device: torch.device) -> int | None:
    """Return the peak memory of `step` as if it ran alone: its allocations plus `held` tensors.

    None on a CPU, where PyTorch counts nothing.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return torch.cuda.max_memory_allocated(device) - before + sum(storages.values())


class Report:
    """Results of a benchmark, saved after every case.

    A time limit or a hanging kernel loses only the case that it interrupts.
    """

    def __init__(self, flags: argparse.Namespace, command: str = "") -> None:
        self.flags = flags
        given = vars(flags)  # not every benchmark has all of these flags
        self.device = pick_device(given.get("device", "auto"))
        self.on_gpu = self.device.type == "cuda"
        self.dtype_name: str = given.get("dtype") or ("bf16" if self.on_gpu else "fp32")
        self.backend: str = given.get("backend") or ("triton" if self.on_gpu else "blockwise")
        limit = given.get("limit")
        self.end = math.inf if limit is None else time.monotonic() + limit
        chosen = {"dtype": self.dtype_name, "device": self.device.type, "backend": self.backend}
        self.data: dict[str, Any] = {
            "environment": environment(command, self.device),
            "settings": given | {name: value for name, value in chosen.items() if name in given},
            "finished": False,
            "rows": [],
            "skipped": [],
        }
        torch.manual_seed(0)
        self.save()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the benchmark's tensors."""
        return DTYPES[self.dtype_name]

    def save(self) -> None:
        """Write the results to --out, if given."""
        if self.flags.out is not None:
            atomic_write_text(self.flags.out, row_json(self.data))

    def add(self, row: Mapping[str, Any]) -> None:
        """Append one row and save."""
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
                reason = recover(error, self.device)
        self.data["skipped"].append({"case": case, "reason": reason})
        self.save()
        print(f"{case} NOT MEASURED: {reason}", flush=True)

    def each(
        self,
        builders: Mapping[str, Callable[[], T]],
        figures: Iterable[str],
        measure: Callable[[str, T, Result], None],
    ) -> dict[str, Result]:
        """Build and measure each implementation of a case; return their results.

        An error ends the implementation's figures, is listed beside them, and ends no other's.
        """
        results: dict[str, Result] = {}
        for name, build in builders.items():
            result = results[name] = {**dict.fromkeys(figures), "errors": {}}
            try:
                measure(name, build(), result)
            except Exception as error:
                result["errors"]["all"] = recover(error, self.device)
        return results

    def finish(self) -> None:
        """Mark the results as complete, unless a case was skipped, and save."""
        self.data["finished"] = not self.data["skipped"]
        self.save()


def pick_device(name: str) -> torch.device:
    """Return the device of `--device`; `auto` is the GPU if there is one."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError("--device cuda: PyTorch sees no CUDA device; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def environment(command: str, device: torch.device) -> dict[str, Any]:
    """Return date, command, hardware and software of a benchmark."""
    hardware: dict[str, Any] = {
        "device": device.type,
        "triton": package_version("triton"),
        "flash_attn": package_version("flash_attn"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        hardware |= {
            "name": properties.name,
            "capability": amd_chip(device) or f"sm_{properties.major}{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "nvidia_smi": nvidia_smi(),
        }
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "processor": cpu_model(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hardware": hardware,
    }


def nvidia_smi() -> dict[str, str]:
    """Return the first GPU's driver, clocks, power and temperature; {} without nvidia-smi."""
    fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
    query = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")
    return dict(zip(fields.split(","), query.strip().split(", "), strict=False)) if query else {}


def figure(result: Mapping[str, Any], what: str) -> float | None:
    """Return a result's median milliseconds, or bytes."""
    value = result[what]
    return value["median"] if isinstance(value, dict) else value


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return the quotient of two figures; None if one is missing."""
    return None if numerator is None or not denominator else numerator / denominator


def cell(figure: float | None, form: str = ".3g") -> str:
    """Return a figure as text for a table; a dash for None."""
    return "-" if figure is None else format(figure, form)


def print_table(
    rows: Sequence[Sequence[str]], results: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """Print aligned columns, the first left-aligned, and then the errors of `results`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        right = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *right]), flush=True)
    for name, result in (results or {}).items():
        for what, error in result["errors"].items():
            print(f"  {name}, {what}: {error}")
    print(flush=True)


def row_json(result: Mapping[str, Any]) -> str:
    """Return JSON with one line per entry, and one per row of an entry that is a list of rows."""
    entries = []
    for key, value in result.items():
        text = json.dumps(value, ensure_ascii=False, default=str)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in value)
            text = f"[\n  {rows}\n ]"
        entries.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def margin(values: Sequence[float]) -> float:
    """Return half of the mean's 95% confidence interval, by Student's t; 0 for one value."""
    if len(values) < 2:
        return 0.0
    degrees = min(len(values) - 1, len(T_95))
    return T_95[degrees - 1] * statistics.stdev(values) / math.sqrt(len(values))


def mean_and_range(values: Sequence[float], form: str) -> str:
    """Format measurements: their mean, and their range if they differ."""
    if not values:
        return "–"
    mean, low, high = (
        format(value, form) for value in (statistics.fmean(values), min(values), max(values))
    )
    return mean if low == high else f"{mean} ({low} to {high})"


def mean_losses(loss: Tensor, edges: Sequence[int]) -> dict[str, float]:
    """Return the mean of losses [..., T], of all and between adjacent positions of `edges`."""
    means = {"all": loss.mean().item()}
    for first, end in itertools.pairwise(edges):
        means[f"{first:,} to {end:,}"] = loss[..., first:end].mean().item()
    return means
