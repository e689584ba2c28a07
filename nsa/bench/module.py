"""`python -m nsa.bench module`: NSA against PyTorch's attention and other NSA implementations.

A case is one head shape at one length. Its implementations alternate, and ratios are taken within
the case. Kinds of case:

    module         three branches and gates, compressed keys given, against dense attention
    peers          shared keys and values, mean pooling included: other kernels of the same pattern
    same-pattern   the same with l = d = l' = 64, as fla does it
    parts          each function of nsa.ops: its rates, and its fraction of the forward pass

Random queries select different blocks. In nsa-local, neighbouring queries are similar and select
mostly the same ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.bench import baselines
from nsa.bench.implementations import (
    FIGURES,
    PARTS,
    PASSES,
    Builders,
    Implementation,
    Inputs,
    least_bytes,
    least_flops,
    measure,
    nsa_functions,
    ratios,
    select,
)
from nsa.bench.options import Shape, add_gpu_flags
from nsa.bench.results import Report, Result, cell, figure, print_table, ratio
from nsa.bench.roofline import pairs
from nsa.ops import (
    NSASpec,
    compress_mean,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
)
from nsa.report.plots import Panel, draw
from nsa.validation import words_of

SPEC = NSASpec()
KINDS = ("module", "peers", "same-pattern", "parts")
# Bases for ratios, where that is not nsa.
BASES = {"fla-with-window": "nsa-with-window"}
# Implementations whose outputs are equal except for rounding and near-ties.
REFERENCES = {"sdpa-cudnn": "sdpa-flash", "flex-causal": "sdpa-flash", **BASES} | dict.fromkeys(
    ("fla", "scalable-flash-nsa", "flash-sparse-attention"), "nsa"
)
AGAINST: dict[str, Callable[[Inputs, Shape], Implementation]] = {
    "sdpa-flash": partial(baselines.sdpa, "sdpa-flash"),
    "sdpa-cudnn": partial(baselines.sdpa, "sdpa-cudnn"),
    "flex-causal": lambda inputs, shape: baselines.flex(inputs, None),
    "flex-blocks": lambda inputs, shape: baselines.flex(inputs, SPEC),
    baselines.NSA_PYTORCH: partial(baselines.pytorch_nsa, spec=SPEC),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    lengths = "1k,2k,4k,6k,8k,16k,32k,64k,128k"
    add_gpu_flags(parser, lengths, shapes_default="m7c,16x4x64,64x4x128,paper")
    about = "kinds of case (%(default)s)"
    parser.add_argument("--kinds", type=words_of(*KINDS), default=",".join(KINDS), help=about)
    about = (
        "baselines of the kind module; FlexAttention compiles for most of a minute (%(default)s)"
    )
    parser.add_argument("--against", type=words_of(*AGAINST), default=",".join(AGAINST), help=about)
    parser.add_argument("--plot", type=_plot_file, help="plot the times to this PNG file")


def _plot_file(text: str) -> Path:
    import matplotlib.figure  # noqa: F401  # if it is missing, fail before measuring

    return Path(text)


def run(report: Report) -> None:
    """Measure every case within the time limit; print a table per case."""
    report.data["libraries"] = baselines.versions()
    run_cases(report, report.flags.kinds, [report.backend])
    if report.flags.plot is not None:
        _plot(report.data["rows"], report.flags.plot)


def run_cases(report: Report, kinds: Sequence[str], backends: Sequence[str]) -> None:
    """Measure these kinds at every shape and length; `parts` on all of the backends."""
    for shape in report.flags.shapes:
        if report.on_gpu:
            torch.compiler.reset()  # lengths of one shape share FlexAttention's compiled code
        for seq_len in report.flags.lengths:
            for kind in kinds:
                case = partial(_case, kind, shape, seq_len, backends, report)
                report.attempt(f"{kind} {shape} T={seq_len}", case)


def _case(kind: str, shape: Shape, seq_len: int, backends: Sequence[str], report: Report) -> None:
    batch = max(1, report.flags.tokens // seq_len)
    spec = baselines.FLA_SPEC if kind == "same-pattern" else SPEC
    inputs = Inputs.random(shape, batch, seq_len, spec, report.device, report.dtype)
    row: dict[str, Any] = {
        "kind": kind,
        "shape": shape.name,
        "heads": shape.sizes,
        "length": seq_len,
        "batch": batch,
    }
    if kind == "parts":
        row |= _measure_parts(inputs, shape, backends, report)
    else:
        builders: dict[str, Callable[[Inputs, Shape, str], Builders]] = {
            "module": partial(_module, against=report.flags.against),
            "peers": _peers,
            "same-pattern": _same_pattern,
        }
        results = measure(builders[kind](inputs, shape, backends[0]), report, REFERENCES)
        over = ratios(results, lambda name: BASES.get(name, "nsa"))
        row |= {"implementations": results, "ratios": over}
    report.add(row)
    _print(row)


def _module(inputs: Inputs, shape: Shape, backend: str, against: Sequence[str]) -> Builders:
    """Three branches and gates on random and on local queries, against dense attention."""
    attention = partial(nsa_attention, spec=SPEC, backend=backend)
    variants = {"nsa": inputs, "nsa-local": inputs.local(SPEC)}
    ours: Builders = {name: partial(Implementation, attention, *x) for name, x in variants.items()}
    return ours | {name: partial(AGAINST[name], inputs, shape) for name in against}


def _peers(inputs: Inputs, shape: Shape, backend: str) -> Builders:
    """All three branches with one set of keys and values."""
    return {
        "nsa": _shared_keys(inputs, SPEC, backend, window=True),
        "scalable-flash-nsa": partial(baselines.scalable_flash_nsa, inputs, shape, SPEC),
        "flash-sparse-attention": partial(baselines.flash_sparse_attention, inputs, shape, SPEC),
    }


def _same_pattern(inputs: Inputs, shape: Shape, backend: str) -> Builders:
    """Compression and selection, which fla's own kernels cover; then with the window."""
    builders: Builders = {}
    for window, ending in ((False, ""), (True, "-with-window")):
        builders[f"nsa{ending}"] = _shared_keys(inputs, baselines.FLA_SPEC, backend, window=window)
        builders[f"fla{ending}"] = partial(baselines.fla, inputs, shape, window=window)
    return builders


def _shared_keys(
    inputs: Inputs, spec: NSASpec, backend: str, *, window: bool
) -> Callable[[], Implementation]:
    """Build NSA with one set of keys and values and mean pooling, with or without its window."""

    def nsa(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        k_cmp, v_cmp = compress_mean(k, spec), compress_mean(v, spec)
        if window:
            return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, spec, backend=backend)
        o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, spec, backend=backend)
        index = select_blocks(q, k_cmp, lse, spec, backend=backend)
        o_sel = selected_attention(q, k, v, index, spec, backend=backend)
        g_cmp, g_sel, _ = (gate[..., None] for gate in gates.unbind(-1))
        return torch.addcmul(o_sel * g_sel, o_cmp, g_cmp)

    tensors = inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates
    return partial(Implementation, nsa, *tensors, note=baselines.SHARED_KV_NOTE)


def _measure_parts(
    inputs: Inputs, shape: Shape, backends: Sequence[str], report: Report
) -> dict[str, Any]:
    """Measure each function on each backend, on the outputs of the previous function."""
    selection = select(inputs, SPEC, "auto")
    functions = {
        f"{name} {backend}": call
        for backend in backends
        for name, call in nsa_functions(inputs, SPEC, backend, selection).items()
    }
    results = measure({name: partial(functions.__getitem__, name) for name in functions}, report)
    batch, seq_len = inputs.q.shape[:2]
    fractions, visible = {}, pairs(shape, batch, seq_len, SPEC)
    for label, result in results.items():
        name, backend = label.split()
        flops = least_flops(name, shape, visible)
        moved = least_bytes(name, shape, SPEC, functions[label].inputs)
        ms = {what: figure(result, what) for what in PASSES}
        result |= {"flops": flops, "bytes": moved}
        result["tflops"] = {what: ratio(flops[what] / 1e9, ms[what]) for what in PASSES}
        result["gbps"] = {what: ratio(moved[what] / 1e6, ms[what]) for what in PASSES}
        if name in PARTS:
            total = figure(results[f"nsa_attention {backend}"], "forward")
            fractions[label] = ratio(ms["forward"], total)
    over = ratios(results, lambda label: f"{label.split()[0]} {backends[0]}")
    return {"implementations": results, "ratios": over, "forward_fraction": fractions}


def _print(row: dict[str, Any]) -> None:
    title = f"{row['kind']} {row['shape']} T={row['length']} batch {row['batch']}"
    heads = [title, "fwd ms", "fwd+bwd ms", "peak GB", "/ base", "/ base", "/ base"]
    results: dict[str, Result] = row["implementations"]
    if row["kind"] == "parts":
        heads += ["fwd TFLOP/s", "fwd+bwd", "fwd GB/s", "fwd+bwd"]
    lines = [heads]
    for name, result in results.items():
        over = row["ratios"].get(name, {})
        times = figure(result, "forward"), figure(result, "forward_backward")
        cells = [*times, ratio(result["peak_bytes"], 1e9), *(over.get(what) for what in FIGURES)]
        if row["kind"] == "parts":
            cells += [*result["tflops"].values(), *result["gbps"].values()]
        lines.append([name, *map(cell, cells)])
    print_table(lines, results)


def _plot(rows: list[dict[str, Any]], out: Path) -> None:
    """Plot milliseconds per sequence, forward and backward: a panel per shape and kind."""
    curves: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for row in sorted(rows, key=itemgetter("length")):
        panel = f"{row['shape']}, {row['kind']}: ms, forward and backward"
        for name, result in row["implementations"].items():
            ms = figure(result, "forward_backward")
            if ms is not None:
                lengths, times = curves.setdefault(panel, {}).setdefault(name, ([], []))
                lengths.append(row["length"])
                times.append(ms / row["batch"])
    axes: dict[str, Any] = {"x": "sequence length", "x_doubles": True, "logarithmic": True}
    draw([Panel(title, lines, marked=True, **axes) for title, lines in curves.items()], out)
