"""`python -m tests.bench module`: NSA against PyTorch's attention and other NSA implementations.

A case is one head shape at one length; ratios are taken within the case. Kinds of case:

    module         three branches and gates with compressed keys given, and one branch whose blocks
                   an index selects, against dense attention
    peers          shared keys and values, mean pooling included: other kernels of the same pattern
    same-pattern   the same with l = d = l' = 64, as fla does it
    parts          each function of nsa.ops

Random queries select different blocks. In nsa-local, neighbouring queries are similar and select
mostly the same ones. Each result lists its kernels with their times.
"""

import argparse
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from nsa.model.config import INDEXED
from nsa.ops import (
    NSASpec,
    compress_mean,
    compressed_attention,
    nsa_attention,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.triton.configs import MAX_CANDIDATES, Config
from nsa.system import package_version
from tests.bench import peers
from tests.bench.harness import Report, Result, Step, add_gpu_flags, lengths, time_step, words_of
from tests.bench.peers import Implementation
from tests.bench.profile import summary, trace
from tests.inputs import Inputs
from tests.ops.tiles import override_choices

Builders = dict[str, Callable[[], Implementation]]
SPEC, M7C = NSASpec(), "12x2x64"
FIGURES = ("forward", "forward_backward", "peak_bytes")
# Implementations whose outputs are equal except for rounding and near-ties.
REFERENCES = {
    "sdpa-cudnn": "sdpa-flash",
    "flex-causal": "sdpa-flash",
    "flex-flash": "sdpa-flash",
    "fla": "nsa",
    "scalable-flash-nsa": "nsa",
}
AGAINST: dict[str, Callable[[Inputs], Implementation]] = {
    "sdpa-flash": partial(peers.sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": partial(peers.sdpa, SDPBackend.CUDNN_ATTENTION),
    "flex-causal": peers.flex,
    "flex-flash": partial(peers.flex, BACKEND="FLASH"),  # FlashAttention-4, if installed
}


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    key: int  # size of each key
    value: int  # size of each value


def shapes(text: str) -> dict[str, Heads]:
    """Parse "m7c,64x4x128": names, or heads x KV heads x key size [x value size]."""
    return {name: parse_heads(M7C if name == "m7c" else name) for name in text.split(",")}


def parse_heads(text: str) -> Heads:
    """Parse heads x KV heads x key size [x value size]."""
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", text):
        heads, kv_heads, key, *value = map(int, text.split("x"))
        if heads % kv_heads == 0:
            return Heads(heads, kv_heads, key, *(value or [key]))
    raise argparse.ArgumentTypeError(
        f"{text}: not the heads of a model; write heads x KV heads x size, for example {M7C}"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser)
    add, every = parser.add_argument, "1k,2k,4k,6k,8k,16k,32k,64k,128k"
    about = "m7c, or heads x KV heads x key size [x value size] (%(default)s)"
    add("--shapes", type=shapes, default="m7c,64x4x128", help=about)
    add("--lengths", type=lengths, default=every, help="of sequences (%(default)s)")
    add("--kinds", type=words_of(*KINDS), default=",".join(KINDS), help="of case (%(default)s)")
    about = "dense attention of the kind module; FlexAttention compiles for a minute (%(default)s)"
    default = "sdpa-flash,sdpa-cudnn,flex-causal"
    add("--against", type=words_of(*AGAINST), default=default, help=about)
    about = "which of each kernel's candidates of tile sizes to take; 0: the first that runs (0)"
    add("--tile", type=int, choices=range(MAX_CANDIDATES), default=0, help=about)


def run(report: Report) -> None:
    """Measure every case within the time limit; print a table per case."""
    report.data["libraries"] = {x: package_version(x) for x in ("fla-core", "flash-nsa")}
    for name, heads in report.flags.shapes.items():
        if report.on_gpu:
            torch.compiler.reset()  # lengths of one shape share FlexAttention's compiled code
        for seq_len in report.flags.lengths:
            for kind in report.flags.kinds:
                case = partial(_case, kind, name, heads, seq_len, report)
                report.attempt(f"{kind} {name} T={seq_len}", case)


def _case(kind: str, name: str, heads: Heads, seq_len: int, report: Report) -> None:
    batch = max(1, report.flags.tokens // seq_len)
    spec = peers.FLA_SPEC if kind == "same-pattern" else SPEC
    inputs = random_inputs(heads, batch, seq_len, spec, report)
    builders, outputs = KINDS[kind](inputs, report), dict[str, Tensor]()
    row = {"kind": kind, "shape": name, "heads": heads, "length": seq_len, "batch": batch}
    base = "nsa_attention" if kind == "parts" else "nsa"
    tile = report.flags.tile
    with override_choices(partial(candidate, tile)) if tile else nullcontext():
        report.compare(row, builders, FIGURES, partial(measure, report, outputs), base)


def candidate(number: int, _: str, options: list[Config]) -> Config:
    """Return a kernel's candidate of this number, or its last one."""
    return options[min(number, len(options) - 1)]


def measure(
    report: Report, outputs: dict[str, Tensor], name: str, x: Implementation, result: Result
) -> None:
    """Time forward, and forward and backward; add peak bytes, kernels, and a difference.

    `outputs` are those of the case's REFERENCES.
    """
    device, seconds = report.device, report.flags.seconds
    result["forward"] = time_step(x.forward, device, seconds)
    reference = REFERENCES.get(name)
    if reference in outputs:
        relative = difference(x.forward(), outputs[reference])
        result["difference"] = {"from": reference, "relative": relative}
    step: Step = x.forward
    if x.differentiable:
        step = x.forward_backward
        result["forward_backward"] = time_step(step, device, seconds)
        result["peak_bytes"] = report.peak_bytes(step)
    result["kernels"] = summary(trace(step, 1, device), 1)["kernels"]
    if name in REFERENCES.values():
        outputs[name] = x.forward()  # last, so that the peak is without it


def random_inputs(heads: Heads, batch: int, seq_len: int, spec: NSASpec, report: Report) -> Inputs:
    """Return normal numbers; compressed keys and values are the selected branch's means."""

    def random(make: Callable[..., Tensor], *sizes: int) -> Tensor:
        return make(batch, seq_len, *sizes, device=report.device, dtype=report.dtype)

    q = random(torch.randn, heads.heads, heads.key)
    k_sel, k_win = (random(torch.randn, heads.kv_heads, heads.key) for _ in range(2))
    v_sel, v_win = (random(torch.randn, heads.kv_heads, heads.value) for _ in range(2))
    pooled = compress_mean(k_sel, spec), compress_mean(v_sel, spec)
    gates = random(torch.rand, heads.heads, 3)
    return Inputs(q, *pooled, k_sel, v_sel, k_win, v_win, gates)


def local(inputs: Inputs, spec: NSASpec) -> Inputs:
    """Return inputs with queries so similar within a block that they mostly select the same."""
    seq_len = inputs.q.shape[1]
    shared = torch.randn_like(inputs.q[:, : spec.select_blocks_len(seq_len)])
    q = shared.repeat_interleave(spec.select_len, 1)[:, :seq_len]
    return replace(inputs, q=q + 0.1 * torch.randn_like(inputs.q))


def _module(inputs: Inputs, report: Report) -> Builders:
    backend = report.backend

    def indexed(q_index: Tensor, k_index: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        selected = select_blocks(q_index, k_index, None, INDEXED, backend=backend)
        return selected_attention(q, k, v, selected, INDEXED, backend=backend)

    attention = partial(nsa_attention, spec=SPEC, backend=backend)
    builders: Builders = {}
    for suffix, x in (("", inputs), ("-local", local(inputs, SPEC))):
        builders[f"nsa{suffix}"] = partial(Implementation, attention, *x.tensors())
        index = x.q[:, :, : x.k_sel.shape[2]], compress_mean(x.k_sel, INDEXED)
        one_branch = partial(indexed, *index)
        builders[f"index{suffix}"] = partial(Implementation, one_branch, x.q, x.k_sel, x.v_sel)
    return builders | {name: partial(AGAINST[name], inputs) for name in report.flags.against}


def _peers(inputs: Inputs, report: Report) -> Builders:
    return {
        "nsa": _shared_keys(inputs, SPEC, report.backend, window=True),
        "scalable-flash-nsa": partial(peers.scalable_flash_nsa, inputs, SPEC),
    }


def _same_pattern(inputs: Inputs, report: Report) -> Builders:
    ours = _shared_keys(inputs, peers.FLA_SPEC, report.backend, window=False)
    return {"nsa": ours, "fla": partial(peers.fla, inputs)}


def _parts(x: Inputs, report: Report) -> Builders:
    backend = report.backend
    lse, index = select(x, SPEC, backend)

    def compressed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compressed_attention(q, k, v, SPEC, backend=backend)[0]

    blocks = partial(select_blocks, spec=SPEC, backend=backend)
    selected = partial(selected_attention, spec=SPEC, backend=backend)
    window = partial(window_attention, window=SPEC.window, backend=backend)
    whole = partial(nsa_attention, spec=SPEC, backend=backend)
    return {
        "nsa_attention": partial(Implementation, whole, *x.tensors()),
        "compressed_attention": partial(Implementation, compressed, x.q, x.k_cmp, x.v_cmp),
        "select_blocks": partial(Implementation, blocks, x.q, x.k_cmp, lse, differentiable=False),
        "selected_attention": partial(Implementation, selected, x.q, x.k_sel, x.v_sel, index),
        "window_attention": partial(Implementation, window, x.q, x.k_win, x.v_win),
    }


@torch.no_grad()
def select(inputs: Inputs, spec: NSASpec, backend: str) -> tuple[Tensor, Tensor]:
    """Return the compressed branch's lse and the selected blocks."""
    q, k, v = inputs.q, inputs.k_cmp, inputs.v_cmp
    _, lse = compressed_attention(q, k, v, spec, backend=backend)
    return lse, select_blocks(q, k, lse, spec, backend=backend)


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

    return partial(Implementation, nsa, inputs.q, inputs.k_sel, inputs.v_sel, inputs.gates)


def difference(x: Tensor, y: Tensor) -> float:
    """Return ‖x − y‖ / ‖y‖."""
    x, y = x.float(), y.float()
    return ((x - y).norm() / y.norm()).item()
