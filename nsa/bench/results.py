"""Benchmark results: environment, JSON saved after every case, ratios and printed tables."""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

import torch

from nsa.atomic_io import atomic_write_text, row_json
from nsa.bench.timing import DeviceLost, Step, recover, time_alternating
from nsa.dtypes import DTYPES
from nsa.monitor.environment import cpu_model
from nsa.ops.triton.configs import amd_chip
from nsa.system import output_of, package_version

Result = dict[str, Any]
T = TypeVar("T")


class Report:
    """Results of a benchmark, saved after every case.

    A time limit, a hanging kernel or a lost device loses only the case that it interrupts.
    """

    def __init__(self, flags: argparse.Namespace, command: str = "") -> None:
        self.flags = flags
        given = vars(flags)  # not every benchmark has all of these flags
        self.device = pick_device(given.get("device", "auto"))
        self.on_gpu = self.device.type == "cuda"
        self.dtype_name: str = given.get("dtype") or ("bf16" if self.on_gpu else "fp32")
        self.backend: str = given.get("backend") or ("triton" if self.on_gpu else "blockwise")
        self._lost: str | None = None
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

    def seconds_left(self) -> float:
        """Return the seconds until --limit is reached."""
        return self.end - time.monotonic()

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
        reason: str | None = self._lost
        if reason is None and self.seconds_left() <= 0:
            reason = f"--limit {self.flags.limit:g} s over"
        if reason is None:
            try:
                return run()
            except Exception as error:  # one case, such as one too large, must not end the others
                try:
                    if isinstance(error, DeviceLost):
                        raise
                    reason = recover(error, self.device)
                except DeviceLost as lost:
                    reason = self._lost = str(lost)
        self.data["skipped"].append({"case": case, "reason": reason})
        self.save()
        print(f"{case} NOT MEASURED: {reason}", flush=True)

    def build(
        self, builders: Mapping[str, Callable[[], T]], figures: Iterable[str]
    ) -> tuple[dict[str, T], dict[str, Result]]:
        """Build each implementation of a case; return them, and results with figures still None.

        The result of an implementation that cannot be built is its error.
        """
        built: dict[str, T] = {}
        results: dict[str, Result] = {
            name: {**dict.fromkeys(figures), "errors": {}} for name in builders
        }
        for name, build in builders.items():
            try:
                built[name] = build()
            except Exception as error:
                results[name]["errors"]["all"] = recover(error, self.device)
        return built, results

    def time(self, steps: Mapping[str, Step], results: dict[str, Result], what: str) -> None:
        """Time alternating steps; write each one's timing or error into its result."""
        timings, errors = time_alternating(
            steps, self.device, seconds=self.flags.seconds, rounds=self.flags.rounds
        )
        for name, timing in timings.items():
            results[name][what] = timing._asdict()
        for name, error in errors.items():
            results[name]["errors"][what] = error

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
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"
        query = output_of("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0")
        hardware |= {
            "name": properties.name,
            "capability": amd_chip(device) or f"sm_{properties.major}{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "rocm": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "nvidia_smi": dict(zip(fields.split(","), query.strip().split(", "), strict=False)),
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
    """Print aligned columns, the first left-aligned, and then the errors of `results`.

    Not by nsa.text, which imports YAML: GPU benchmarks run where only PyTorch and Triton are.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        right = (text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        print("  ".join([first.ljust(widths[0]), *right]), flush=True)
    if results is not None:
        for name, result in results.items():
            for what, error in result["errors"].items():
                print(f"  {name}, {what}: {error}")
        print(flush=True)
