"""`python -m nsa.bench module`: whole NSA beside PyTorch's attention and other NSAs, in one run.

Every case is one head shape at one length. Its contenders take turns, and ratios are taken inside
the case. Four kinds of case:

    module         the three branches and gates, compressed keys given, against dense attention.
                   Random queries choose blocks of their own; in nsa-local, neighbours are alike
    same-pattern   l = d = l' = 64, shared keys and values, mean pooling included: as fla does it
    selected       the selected branch alone, over random and over local blocks given to it
    parts          the forward pass, whole and function by function, and each one's share
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.bench import goals, peers
from nsa.bench.calls import Chosen, calls
from nsa.bench.contenders import Builders, Contender, figure, measure, ratios
from nsa.bench.dense import flex, sdpa
from nsa.bench.inputs import Inputs, mean_pool, neighbour_overlap, selection
from nsa.bench.report import Report, check_plot, plot_lines, ratio, shown, table
from nsa.bench.shapes import FUNCTIONS, PARTS, Shape
from nsa.ops import (
    NSASpec,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
)

SPEC = NSASpec()
# Whose outputs are equal, but for rounding and near-ties, if a case compares like with like.
TWINS = {
    "sdpa-cudnn": "sdpa-flash",
    "flex-causal": "sdpa-flash",
    "fla": "nsa",
    "fla-with-window": "nsa-with-window",
    "fla-random": "nsa-random",
    "fla-local": "nsa-local",
}
# Whom a contender is held against, where that is not nsa.
BASES = {
    "fla-with-window": "nsa-with-window",
    "fla-random": "nsa-random",
    "fla-local": "nsa-local",
}


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure every case that fits into the time; prints a table a case."""
    check_plot(flags.plot)
    report = Report(flags)
    report.data["peers"] = peers.versions()
    backend = flags.backend or ("triton" if report.device.type == "cuda" else "blockwise")
    report.data["settings"]["backend"] = backend
    for shape in flags.shapes:
        if report.device.type == "cuda":
            torch.compiler.reset()  # lengths of one shape share FlexAttention's compiled code
        for seq_len in flags.lengths:
            for kind in flags.kinds:
                case = partial(_case, kind, shape, seq_len, backend, report)
                report.attempt(f"{kind} {shape.name} T={seq_len}", case)
        if flags.plot is not None:
            plot_lines(_panels(report), flags.plot, "ms a sequence, forward and backward")
    rows = report.data["rows"] if report.device.type == "cuda" else []
    return report.finish(goals=goals.of_module(rows))


def _case(kind: str, shape: Shape, seq_len: int, backend: str, report: Report) -> None:
    flags, device = report.flags, report.device
    batch = max(1, flags.tokens // seq_len)
    row: dict[str, Any] = {
        "kind": kind,
        "shape": shape.name,
        "heads": [shape.heads, shape.kv_heads, shape.key, shape.value],
        "length": seq_len,
        "batch": batch,
    }
    spec = peers.FLA_SPEC if kind == "same-pattern" else SPEC
    inputs = Inputs.of(shape, batch, seq_len, spec, device, report.dtype)
    builders: Builders
    if kind == "module":
        builders, row["neighbour_overlap"] = _module(inputs, shape, backend, flags.selection)
    elif kind == "selected":
        builders, row["neighbour_overlap"] = _selected(inputs, shape, backend, flags.selection)
    elif kind == "same-pattern":
        builders = _same_pattern(inputs, shape, backend)
    else:
        builders = _parts(inputs, backend)
    if flags.only and kind != "parts":
        builders = {
            name: one
            for name, one in builders.items()
            if name in flags.only or name in ("nsa", *BASES.values())
        }
    found = measure(builders, report, TWINS)
    row |= {"contenders": found, "ratios": {}}
    if kind == "parts":
        row["forward_share"] = _shares(found)
    else:
        row["ratios"] = ratios(found, lambda name: BASES.get(name, "nsa"))
    report.add(row)
    _show(row)


def _shares(found: dict[str, dict[str, Any]]) -> dict[str, float | None]:
    """Each part's time over that of the whole forward pass."""
    times = {name: figure(one, "forward") for name, one in found.items()}
    return {name: ratio(times[name], times["nsa_attention"]) for name in PARTS}


Built = dict[str, Callable[[], Contender]]


def _module(
    inputs: Inputs, shape: Shape, backend: str, contents: list[str]
) -> tuple[Built, dict[str, float]]:
    """Builders, and how much of a query's selection the query before it shares."""
    whole = partial(nsa_attention, spec=SPEC, backend=backend)
    ours = {"nsa": inputs}
    if "local" in contents:
        ours["nsa-local"] = inputs.local(SPEC)
    overlap = {
        name: neighbour_overlap(Chosen.of(given, SPEC, backend).index)
        for name, given in ours.items()
    }
    builders: Built = {
        name: partial(Contender, whole, *given.tensors()) for name, given in ours.items()
    }
    return builders | {
        "sdpa-flash": lambda: sdpa("sdpa-flash", inputs, shape),
        "sdpa-cudnn": lambda: sdpa("sdpa-cudnn", inputs, shape),
        "flex-causal": lambda: flex(inputs, None),
        "flex-blocks": lambda: flex(inputs, SPEC),
        "native-sparse-attention-pytorch": lambda: peers.pytorch_nsa(inputs, shape, SPEC),
    }, overlap


def _selected(
    inputs: Inputs, shape: Shape, backend: str, contents: list[str]
) -> tuple[Built, dict[str, float]]:
    """Builders of the selected branch, and how much neighbours share of what it is given."""

    def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
        return selected_attention(q, k, v, index, SPEC, backend=backend)

    builders: Built = {}
    overlap = {}
    batch, seq_len = inputs.q.shape[:2]
    for content in contents:
        index = selection(content, batch, seq_len, shape.kv_heads, SPEC, inputs.q.device)
        overlap[content] = neighbour_overlap(index)
        tensors = inputs.q, inputs.k_sel, inputs.v_sel, index
        builders[f"nsa-{content}"] = partial(Contender, attend, *tensors)
        builders[f"fla-{content}"] = partial(peers.fla_selected, inputs, shape, SPEC, index)
    return builders, overlap


def _same_pattern(inputs: Inputs, shape: Shape, backend: str) -> Built:
    """Compression and selection alone, which is all fla's own kernels do; then with the window."""
    spec = peers.FLA_SPEC

    def nsa(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, window: bool) -> Tensor:
        k_cmp, v_cmp = mean_pool(k, spec), mean_pool(v, spec)
        if window:
            return nsa_attention(q, k_cmp, v_cmp, k, v, k, v, gates, spec, backend=backend)
        o_cmp, lse = compressed_attention(q, k_cmp, v_cmp, spec, backend=backend)
        index = select_blocks(q, k_cmp, lse, spec, backend=backend)
        o_sel = selected_attention(q, k, v, index, spec, backend=backend)
        g_cmp, g_sel, _ = (gate[..., None] for gate in gates.unbind(-1))
        return torch.addcmul(o_sel * g_sel, o_cmp, g_cmp)

    def ours(window: bool) -> Contender:
        note = "keys and values shared by the branches; mean pooling included"
        tensors = inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates
        return Contender(partial(nsa, window=window), *tensors, note=note)

    builders: Built = {}
    for window, ending in ((False, ""), (True, "-with-window")):
        builders[f"nsa{ending}"] = partial(ours, window)
        builders[f"fla{ending}"] = partial(peers.fla, inputs, shape, spec, window=window)
    return builders


def _parts(inputs: Inputs, backend: str) -> Built:
    """The whole forward pass, and each function's on what the one before it has computed."""
    by_name = calls(inputs, Chosen.of(inputs, SPEC, backend), SPEC, backend)
    return {
        name: partial(Contender, by_name[name].function, *by_name[name].tensors, learns=False)
        for name in FUNCTIONS
    }


def _show(row: dict[str, Any]) -> None:
    title = f"{row['kind']} {row['shape']} T={row['length']} batch {row['batch']}"
    lines = [[title, "fwd ms", "fwd+bwd ms", "peak GB", "/ nsa", "/ nsa", "/ nsa"]]
    reasons = []
    for name, one in row["contenders"].items():
        peak = one["peak_bytes"]
        over = row["ratios"].get(name, {})
        lines.append(
            [
                name,
                shown(figure(one, "forward")),
                shown(figure(one, "forward_backward")),
                shown(None if peak is None else peak / 1e9),
                *(shown(over.get(what)) for what in ("forward", "forward_backward", "peak_bytes")),
            ]
        )
        reasons += [f"  {name}, {what}: {why}" for what, why in one["why_not"].items()]
    table(lines)
    print(*reasons, "", sep="\n", flush=True)


def _panels(report: Report) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What was measured forward and backward: a panel a shape, a line a contender."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for title, name, length, ms in _points(report.data["rows"]):
        panels.setdefault(title, {}).setdefault(name, []).append((length, ms))
    return {
        title: {name: sorted(points) for name, points in lines.items()}
        for title, lines in panels.items()
    }


def _points(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, int, float]]:
    for row in rows:
        if row["kind"] == "parts":
            continue
        title = row["shape"] + {"module": ""}.get(row["kind"], f", {row['kind']}")
        for name, one in row["contenders"].items():
            ms = figure(one, "forward_backward")
            if ms is not None:
                yield title, name, row["length"], ms / row["batch"]
