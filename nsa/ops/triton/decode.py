"""Launchers and custom op of decoding: one new token of each sequence behind a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import torch
import triton
from torch import Tensor

from nsa.ops.triton.common import LOG2E, padded_size, precision
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.decode_parts import (
    decode_compressed_kernel,
    decode_importance_kernel,
    decode_mix_kernel,
    decode_parts_kernel,
    decode_rank_kernel,
)
from nsa.ops.triton.launch import launch, rows_contiguous
from nsa.spec import NSASpec

PART = 128  # compressed keys, or positions of the window, that one program attends to
BLOCKS = 64  # selection blocks that one program ranks
ELEMENTS = 2048  # of the outputs that are joined at a time


def decode_attention(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_sel: Tensor | None,
    v_sel: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    lengths: Tensor,
    spec: NSASpec,
    *,
    branches: Sequence[str],
    scale: float,
) -> Tensor:
    """`nsa.ops.decode.decode_attention`, whose caller has checked what is given here."""
    given = (k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    return triton_decode(q, *given, gates, lengths, list(astuple(spec)), "+".join(branches), scale)


@torch.library.custom_op("nsa::triton_decode", mutates_args=())
def triton_decode(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_sel: Tensor | None,
    v_sel: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    lengths: Tensor,
    pattern: list[int],
    branches: str,
    scale: float,
) -> Tensor:
    """[B, Hq, Dv] of q [B, Hq, Dk]; no gradient."""
    pairs = {"cmp": (k_cmp, v_cmp), "sel": (k_sel, v_sel), "win": (k_win, v_win)}
    names = branches.split("+")
    return decode_forward(q, pairs, gates, lengths, NSASpec(*pattern), names, scale)


@triton_decode.register_fake
def _(q: Tensor, *rest: Any) -> Tensor:
    *pairs, _gates, _lengths, _pattern, branches, _scale = rest
    values = dict(zip(("cmp", "sel", "win"), pairs[1::2], strict=True))[branches[:3]]
    return q.new_empty(*q.shape[:2], values.shape[-1])


def decode_forward(
    q: Tensor,
    pairs: Mapping[str, tuple[Tensor | None, Tensor | None]],
    gates: Tensor,
    lengths: Tensor,
    spec: NSASpec,
    branches: Sequence[str],
    scale: float,
) -> Tensor:
    """Five launches, fewer where a branch is missing or the buffers hold no block too many."""
    batch, heads = q.shape[:2]
    k, v = (x for x in pairs[branches[0]] if x is not None)
    constants, config = _constants(q, k, v, spec, branches)
    k_sel, k_cmp = pairs["sel"][0], pairs["cmp"][0]
    blocks = 0 if k_sel is None else spec.select_blocks_len(k_sel.shape[1])
    choosing = blocks > constants["TOP"] > 0
    keys = k_cmp.shape[1] if k_cmp is not None and (choosing or "cmp" in branches) else 0
    compressed, first = triton.cdiv(keys, PART), constants["FIRST_PART"]
    given = _buffers(pairs, branches) | {
        "q": q.contiguous(),
        "gates": gates.contiguous(),
        "lengths": lengths.contiguous(),
        "scale": scale * LOG2E,
        "parts": _room(first + compressed),
        "row_scores": _room(keys),
        "blocks": _room(blocks),
        "out": q.new_empty(batch, heads, v.shape[-1]),
        "index": q.new_empty(batch, k.shape[2], spec.select_top, dtype=torch.int32),
    }
    for name, shape in {
        "o": (batch, heads, given["parts"], v.shape[-1]),
        "lse": (batch, heads, given["parts"]),
        "scores": (batch, heads, given["row_scores"]),
        "importance": (batch, k.shape[2], given["blocks"]),
    }.items():
        given[name] = q.new_empty(shape, dtype=torch.float32)
    if not choosing:
        given["scores"] = None

    def start(kernel: Any, grid: tuple[int, ...], config: Config) -> None:
        """Start a kernel with what it asks for by name."""
        asked = kernel.arg_names
        chosen = {name: constants[name] for name in asked if name in constants}
        launch(kernel, grid, {name: given[name] for name in asked if name in given}, chosen, config)

    groups = k.shape[2]
    shares = groups * triton.cdiv(heads // groups, config.rows)
    start(decode_compressed_kernel, (compressed, shares, batch), config)
    if choosing:
        ranked = (triton.cdiv(blocks, BLOCKS), groups, batch)
        start(decode_importance_kernel, ranked, Config(BLOCKS, 0, 4, 1))
        start(decode_rank_kernel, ranked, Config(BLOCKS, 0, 4, 1))
    start(decode_parts_kernel, (first, shares, batch), config)
    start(decode_mix_kernel, (heads, batch), Config(1, constants["TILE"], 1, 1))
    return given["out"]


def _constants(
    q: Tensor, k: Tensor, v: Tensor, spec: NSASpec, branches: Sequence[str]
) -> tuple[dict[str, Any], Config]:
    """What the kernels are compiled for; parts are those of blocks, of the window, of the rest."""
    sizes = padded_size(q.shape[2]), padded_size(v.shape[3])
    config = choose_config("gathered_decode", sizes, q.dtype)
    group = q.shape[1] // k.shape[2]
    top = spec.select_top if "sel" in branches else 0
    window = spec.window if "win" in branches else 0
    gates = {name.upper(): -1 for name in ("cmp", "sel", "win")}
    return {
        **{"GROUP": group, "GROUP_P": padded_size(group), "ROWS": config.rows},
        **{"KEY": q.shape[2], "VALUE": v.shape[3], "KEY_P": sizes[0], "VALUE_P": sizes[1]},
        **{"LEN": spec.block_len, "STRIDE": spec.block_stride, "SELECT": spec.select_len},
        "COUNT": spec.touching,
        **{"TOP": top, "INIT": spec.init_blocks, "LOCAL": spec.local_blocks, "WINDOW": window},
        **{"PART": PART, "FIRST_PART": top + triton.cdiv(window, PART), "KEYS": config.keys},
        **{"BLOCKS": BLOCKS, "TILE": max(1, ELEMENTS // sizes[1]), "GATES": len(branches)},
        "PRECISION": precision(q.dtype),
        **gates,
        **{name.upper(): place for place, name in enumerate(branches)},
    }, config


def _buffers(
    pairs: Mapping[str, tuple[Tensor | None, Tensor | None]], branches: Sequence[str]
) -> dict[str, Any]:
    """Keys and values and their strides by the names that kernels have for them."""
    given: dict[str, Any] = {}
    for name, pair in pairs.items():
        for kind, x in zip("kv", pair, strict=True):
            label = f"{kind}_{name}"
            asked = name in branches or label == "k_cmp"
            x = None if x is None or not asked else rows_contiguous(x)
            given[label] = x
            steps = (0, 0, 0) if x is None else x.stride()
            given |= {f"{label}_{axis}": step for axis, step in zip("bth", steps, strict=False)}
    k_win = given["k_win"]
    given["ring"] = 1 if k_win is None else k_win.shape[1]
    return given


def _room(count: int) -> int:
    """A multiple of 16 for rows that grow with the buffers: Triton compiles anew for other ones."""
    return triton.cdiv(count, 16) * 16
