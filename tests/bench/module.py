"""`python -m tests.bench module`: NSA against PyTorch's attention and other NSA implementations.

A case is one head shape at one length; ratios are taken within the case. Kinds of case:

    module         three branches and gates, compressed keys given, against dense attention
    peers          shared keys and values, mean pooling included: other kernels of the same pattern
    same-pattern   the same with l = d = l' = 64, as fla does it
    parts          each function of nsa.ops, and its fraction of the forward pass

Random queries select different blocks. In nsa-local, neighbouring queries are similar and select
mostly the same ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.ops import (
    NSASpec,
    compress_mean,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
)
from tests.bench import peers
from tests.bench.attention import (
    FIGURES,
    Builders,
    Implementation,
    Inputs,
    measure,
    nsa_functions,
)
from tests.bench.formats import words_of
from tests.bench.harness import (
    Report,
    Result,
    Shape,
    add_gpu_flags,
    cell,
    figure,
    print_table,
    ratio,
)

SPEC = NSASpec()
# Implementations whose outputs are equal except for rounding and near-ties.
REFERENCES = {
    "sdpa-cudnn": "sdpa-flash",
    "flex-causal": "sdpa-flash",
    "fla": "nsa",
    "fla-with-window": "nsa-with-window",
    "scalable-flash-nsa": "nsa",
    "flash-sparse-attention": "nsa",
}
AGAINST: dict[str, Callable[[Inputs, Shape], Implementation]] = {
    "sdpa-flash": partial(peers.sdpa, "sdpa-flash"),
    "sdpa-cudnn": partial(peers.sdpa, "sdpa-cudnn"),
    "flex-causal": peers.flex,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    lengths = "1k,2k,4k,6k,8k,16k,32k,64k,128k"
    add_gpu_flags(parser, lengths, shapes_default="m7c,16x4x64,64x4x128,paper")
    about = "kinds of case (%(default)s)"
    parser.add_argument("--kinds", type=words_of(*KINDS), default=",".join(KINDS), help=about)
    about = "dense attention of the kind module; FlexAttention compiles for a minute (%(default)s)"
    parser.add_argument("--against", type=words_of(*AGAINST), default=",".join(AGAINST), help=about)


def run(report: Report) -> None:
    """Measure every case within the time limit; print a table per case."""
    report.data["libraries"] = peers.versions()
    for shape in report.flags.shapes:
        if report.on_gpu:
            torch.compiler.reset()  # lengths of one shape share FlexAttention's compiled code
        for seq_len in report.flags.lengths:
            for kind in report.flags.kinds:
                case = partial(_case, kind, shape, seq_len, report)
                report.attempt(f"{kind} {shape.name} T={seq_len}", case)


def _case(kind: str, shape: Shape, seq_len: int, report: Report) -> None:
    batch = max(1, report.flags.tokens // seq_len)
    spec = peers.FLA_SPEC if kind == "same-pattern" else SPEC
    inputs = Inputs.random(shape, batch, seq_len, spec, report.device, report.dtype)
    results = measure(KINDS[kind](inputs, shape, report), report, REFERENCES)
    bases = {"fla-with-window": "nsa-with-window"}
    default = "nsa_attention" if kind == "parts" else "nsa"
    ratios = {
        name: {what: ratio(figure(x, what), figure(results[base], what)) for what in FIGURES}
        for name, x in results.items()
        if (base := bases.get(name, default)) != name
    }
    row = {"kind": kind, "shape": shape.name, "heads": shape.sizes, "length": seq_len}
    report.add(row | {"batch": batch, "implementations": results, "ratios": ratios})
    _print(f"{kind} {shape.name} T={seq_len} batch {batch}", results, ratios)


def _module(inputs: Inputs, shape: Shape, report: Report) -> Builders:
    """Three branches and gates on random and on local queries, against dense attention."""
    attention = partial(nsa_attention, spec=SPEC, backend=report.backend)
    variants = {"nsa": inputs, "nsa-local": inputs.local(SPEC)}
    ours: Builders = {name: partial(Implementation, attention, *x) for name, x in variants.items()}
    return ours | {name: partial(AGAINST[name], inputs, shape) for name in report.flags.against}


def _peers(inputs: Inputs, shape: Shape, report: Report) -> Builders:
    """All three branches with one set of keys and values."""
    return {
        "nsa": _shared_keys(inputs, SPEC, report.backend, window=True),
        "scalable-flash-nsa": partial(peers.scalable_flash_nsa, inputs, shape, SPEC),
        "flash-sparse-attention": partial(peers.flash_sparse_attention, inputs, shape, SPEC),
    }


def _same_pattern(inputs: Inputs, shape: Shape, report: Report) -> Builders:
    """Compression and selection, which fla's own kernels cover; then with the window."""
    builders: Builders = {}
    for window, ending in ((False, ""), (True, "-with-window")):
        ours = _shared_keys(inputs, peers.FLA_SPEC, report.backend, window=window)
        theirs = partial(peers.fla, inputs, shape, window=window)
        builders |= {f"nsa{ending}": ours, f"fla{ending}": theirs}
    return builders


def _parts(inputs: Inputs, shape: Shape, report: Report) -> Builders:
    """Each function of nsa.ops, on the outputs of the previous function."""
    return nsa_functions(inputs, SPEC, report.backend)


KINDS = {"module": _module, "peers": _peers, "same-pattern": _same_pattern, "parts": _parts}


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
    return partial(Implementation, nsa, *tensors, note=peers.SHARED_KV_NOTE)


def _print(title: str, results: dict[str, Result], ratios: dict[str, Any]) -> None:
    lines = [[title, "fwd ms", "fwd+bwd ms", "peak GB", "/ base", "/ base", "/ base"]]
    for name, result in results.items():
        over = ratios.get(name, {})
        times = figure(result, "forward"), figure(result, "forward_backward")
        cells = [*times, ratio(result["peak_bytes"], 1e9), *(over.get(what) for what in FIGURES)]
        lines.append([name, *map(cell, cells)])
    print_table(lines, results)
