"""`python -m nsa.bench module`: NSA against PyTorch's attention and other NSA implementations.

A case is one head shape at one length. Its implementations alternate, and ratios are taken within
the case. Kinds of case:

    module         three branches and gates, compressed keys given, against dense attention. Random
                   queries select different blocks; in nsa-local, neighbouring queries are similar
    same-pattern   l = d = l' = 64, shared keys and values, mean pooling included: as fla does it
    selected       the selected branch alone, given random and local blocks
    parts          the forward pass, total and by function, and each function's fraction
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.bench import baselines, goals
from nsa.bench.implementations import Implementation, Result, figure, measure, ratios
from nsa.bench.inputs import Inputs, mean_pool, neighbour_overlap, random_selection
from nsa.bench.operations import FUNCTIONS, PARTS, Selection, calls
from nsa.bench.options import Shape, add_gpu_flags, choice, names
from nsa.bench.results import Report, cell, print_errors, print_table, ratio
from nsa.ops import NSASpec, compressed_attention, nsa_attention, select_blocks, selected_attention
from nsa.report.plots import COLOURS

SPEC = NSASpec()
KINDS = ("module", "same-pattern", "selected", "parts")
SELECTIONS = ("random", "local")
# Bases for ratios, where that is not nsa.
BASES = {f"fla-{what}": f"nsa-{what}" for what in ("with-window", "random", "local")}
# Outputs that are equal but for rounding and near-ties.
REFERENCES = {"sdpa-cudnn": "sdpa-flash", "flex-causal": "sdpa-flash", "fla": "nsa", **BASES}
Built = dict[str, Callable[[], Implementation]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    lengths = "1k,2k,4k,6k,8k,16k,32k,64k,128k"
    add_gpu_flags(parser, lengths, shapes_default="m7c,16x4x64,64x4x128,paper")
    for flag, values, about in (
        ("--selection", SELECTIONS, "neighbouring queries select different or mostly equal blocks"),
        ("--kinds", KINDS, "against dense attention, fla's pattern, selected branch, functions"),
    ):
        default = ",".join(values)
        parser.add_argument(flag, type=choice(*values), default=default, help=about)
    parser.add_argument("--only", type=names, help="implementations to measure beside nsa")
    parser.add_argument("--plot", type=Path, help="plot the times to this PNG file")


def run(flags: argparse.Namespace) -> None:
    """Measure every case within the time limit; print a table per case."""
    _check_plot(flags.plot)
    report = Report(flags)
    report.data["libraries"] = baselines.versions()
    for shape in flags.shapes:
        if report.on_gpu:
            torch.compiler.reset()  # lengths of one shape share FlexAttention's compiled code
        for seq_len in flags.lengths:
            for kind in flags.kinds:
                case = partial(_case, kind, shape, seq_len, report)
                report.attempt(f"{kind} {shape.name} T={seq_len}", case)
        if flags.plot is not None:
            _plot(report.data["rows"], flags.plot)
    report.finish(goals=goals.of_module(report.data["rows"] if report.on_gpu else []))


def _case(kind: str, shape: Shape, seq_len: int, report: Report) -> None:
    flags, backend = report.flags, report.backend
    batch = max(1, flags.tokens // seq_len)
    row: dict[str, Any] = {
        "kind": kind,
        "shape": shape.name,
        "heads": shape.sizes,
        "length": seq_len,
        "batch": batch,
    }
    spec = baselines.FLA_SPEC if kind == "same-pattern" else SPEC
    inputs = Inputs.random(shape, batch, seq_len, spec, report.device, report.dtype)
    if kind == "module":
        builders, row["neighbour_overlap"] = _module(inputs, shape, backend, flags.selection)
    elif kind == "selected":
        builders, row["neighbour_overlap"] = _selected(inputs, shape, backend, flags.selection)
    elif kind == "same-pattern":
        builders = _same_pattern(inputs, shape, backend)
    else:
        builders = _parts(inputs, backend)
    if flags.only and kind != "parts":
        kept = {*flags.only, "nsa", *BASES.values()}
        builders = {name: build for name, build in builders.items() if name in kept}
    results = measure(builders, report, REFERENCES)
    row |= {"implementations": results, "ratios": {}}
    if kind == "parts":
        total = figure(results["nsa_attention"], "forward")
        row["forward_fraction"] = {
            name: ratio(figure(results[name], "forward"), total) for name in PARTS
        }
    else:
        row["ratios"] = ratios(results, lambda name: BASES.get(name, "nsa"))
    report.add(row)
    _print(row)


def _module(
    inputs: Inputs, shape: Shape, backend: str, selections: list[str]
) -> tuple[Built, dict[str, float]]:
    """Builders, and the fraction of a query's blocks that the previous query selected too."""
    attention = partial(nsa_attention, spec=SPEC, backend=backend)
    variants = {"nsa": inputs}
    if "local" in selections:
        variants["nsa-local"] = inputs.local(SPEC)
    overlap = {
        name: neighbour_overlap(Selection.of(x, SPEC, backend).index)
        for name, x in variants.items()
    }
    builders: Built = {name: partial(Implementation, attention, *x) for name, x in variants.items()}
    return builders | {
        "sdpa-flash": lambda: baselines.sdpa("sdpa-flash", inputs, shape),
        "sdpa-cudnn": lambda: baselines.sdpa("sdpa-cudnn", inputs, shape),
        "flex-causal": lambda: baselines.flex(inputs, None),
        "flex-blocks": lambda: baselines.flex(inputs, SPEC),
        "native-sparse-attention-pytorch": lambda: baselines.pytorch_nsa(inputs, shape, SPEC),
    }, overlap


def _selected(
    inputs: Inputs, shape: Shape, backend: str, selections: list[str]
) -> tuple[Built, dict[str, float]]:
    """Builders of the selected branch, and the overlap of neighbours for each selection."""
    attention = partial(selected_attention, spec=SPEC, backend=backend)
    builders: Built = {}
    overlap = {}
    batch, seq_len = inputs.q.shape[:2]
    for kind in selections:
        index = random_selection(kind, batch, seq_len, shape.kv_heads, SPEC, inputs.q.device)
        overlap[kind] = neighbour_overlap(index)
        tensors = inputs.q, inputs.k_sel, inputs.v_sel, index
        builders[f"nsa-{kind}"] = partial(Implementation, attention, *tensors)
        builders[f"fla-{kind}"] = partial(baselines.fla_selected, inputs, shape, SPEC, index)
    return builders, overlap


def _same_pattern(inputs: Inputs, shape: Shape, backend: str) -> Built:
    """Compression and selection, which fla's own kernels cover; then with the window."""
    spec = baselines.FLA_SPEC

    def nsa(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, window: bool) -> Tensor:
        k_cmp, v_cmp = mean_pool(k, spec), mean_pool(v, spec)
        if window:
            return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, spec, backend=backend)
        o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, spec, backend=backend)
        index = select_blocks(q, k_cmp, lse, spec, backend=backend)
        o_sel = selected_attention(q, k, v, index, spec, backend=backend)
        g_cmp, g_sel, _ = (gate[..., None] for gate in gates.unbind(-1))
        return torch.addcmul(o_sel * g_sel, o_cmp, g_cmp)

    note = "keys and values shared by the branches; mean pooling included"
    tensors = inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates
    builders: Built = {}
    for window, ending in ((False, ""), (True, "-with-window")):
        attention = partial(nsa, window=window)
        builders[f"nsa{ending}"] = partial(Implementation, attention, *tensors, note=note)
        builders[f"fla{ending}"] = partial(baselines.fla, inputs, shape, spec, window=window)
    return builders


def _parts(inputs: Inputs, backend: str) -> Built:
    """The forward pass, and each function's on the outputs of the previous one."""
    by_name = calls(inputs, Selection.of(inputs, SPEC, backend), SPEC, backend)
    return {
        name: partial(
            Implementation, by_name[name].function, *by_name[name].tensors, differentiable=False
        )
        for name in FUNCTIONS
    }


def _print(row: dict[str, Any]) -> None:
    title = f"{row['kind']} {row['shape']} T={row['length']} batch {row['batch']}"
    lines = [[title, "fwd ms", "fwd+bwd ms", "peak GB", "/ nsa", "/ nsa", "/ nsa"]]
    results: dict[str, Result] = row["implementations"]
    for name, result in results.items():
        peak, over = result["peak_bytes"], row["ratios"].get(name, {})
        times = figure(result, "forward"), figure(result, "forward_backward")
        relative = (over.get(what) for what in ("forward", "forward_backward", "peak_bytes"))
        cells = *times, None if peak is None else peak / 1e9, *relative
        lines.append([name, *map(cell, cells)])
    print_table(lines)
    print_errors(results)


def _check_plot(out: Path | None) -> None:
    """Raise before the first measurement if matplotlib is missing."""
    try:
        if out is not None:
            import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--plot {out} needs matplotlib: pip install 'nsa-m7c[dev]'") from error


def _plot(rows: list[dict[str, Any]], out: Path) -> None:
    """Milliseconds per sequence, forward and backward: a panel per shape and kind, log axes."""
    from matplotlib.figure import Figure

    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        title = row["shape"] + ("" if row["kind"] == "module" else f", {row['kind']}")
        for name, result in row["implementations"].items():
            ms = figure(result, "forward_backward")
            if ms is not None and row["kind"] != "parts":
                curve = panels.setdefault(title, {}).setdefault(name, [])
                curve.append((row["length"], ms / row["batch"]))
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    columns = max(1, len(panels))
    picture = Figure(figsize=(5.0 * columns, 4.0), dpi=150, layout="constrained")
    for axis, (title, curves) in zip(
        picture.subplots(1, columns, squeeze=False)[0], panels.items(), strict=False
    ):
        for label, points in curves.items():
            number = labels.index(label)
            style = ("-", "--")[number // len(COLOURS) % 2]
            colour = COLOURS[number % len(COLOURS)]
            x, y = zip(*sorted(points), strict=True)
            axis.plot(x, y, style, label=label, color=colour, marker="o")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequence length")
        axis.set_ylabel("ms per sequence, forward and backward")
        axis.set_title(title)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.legend(frameon=False, fontsize=7)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(out)
