"""Launcher and custom op of decoding: one new token of each sequence attends over its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.ops.custom_op import register
from nsa.ops.triton.common import LOG2E, constants_of, pattern
from nsa.ops.triton.configs import SHORT, Config, choose_config
from nsa.ops.triton.decode_parts import (
    decode_compressed_kernel,
    decode_importance_kernel,
    decode_mix_kernel,
    decode_parts_kernel,
    decode_rank_kernel,
)
from nsa.ops.triton.launch import cdiv, launch, padded_size
from nsa.spec import NSASpec

PART = 128  # compressed keys, or positions of the window, that one program attends to
BLOCKS = 64  # selection blocks that one program ranks
ELEMENTS = 2048  # elements of o that the last kernel joins at a time


class DecodeInputs(NamedTuple):
    """Inputs of the op, as `nsa.ops.decode.decode_attention` describes and checks them."""

    q: Tensor  # [B, Hq, Dk]
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_sel: Tensor | None
    v_sel: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    gates: Tensor  # [B, Hq, branches]
    lengths: Tensor  # int64 [B]
    spec: NSASpec
    branches: str  # names joined by +
    scale: float

    def pair(self, branch: str) -> tuple[Tensor, Tensor]:
        """A branch's buffers of keys and values."""
        return getattr(self, f"k_{branch}"), getattr(self, f"v_{branch}")


def decode_forward(x: DecodeInputs) -> Tensor:
    """Run five kernels, fewer without a branch or with at most TOP blocks."""
    (batch, heads, _), spec, branches = x.q.shape, x.spec, x.branches.split("+")
    k, v = x.pair(branches[0])
    constants, config = _constants(x, k, v, branches)
    blocks = 0 if x.k_sel is None else spec.select_blocks_len(x.k_sel.shape[1])
    selecting = blocks > constants["C"].TOP > 0
    keys = x.k_cmp.shape[1] if x.k_cmp is not None and (selecting or "cmp" in branches) else 0
    compressed, first = cdiv(keys, PART), constants["FIRST_PART"]
    arguments = _buffers(x, branches) | {
        **{"q": x.q.contiguous(), "gates": x.gates.contiguous(), "scale": x.scale * LOG2E},
        "lengths": x.lengths.contiguous(),
        "parts": _capacity(first + compressed),
        "row_scores": _capacity(keys),
        "blocks": _capacity(blocks),
        "out": _fake(x),
        "index": x.q.new_empty(batch, k.shape[2], spec.select_top, dtype=torch.int32),
    }
    for name, shape in {
        "o": (batch, heads, arguments["parts"], v.shape[-1]),
        "lse": (batch, heads, arguments["parts"]),
        "scores": (batch, heads, arguments["row_scores"]),
        "importance": (batch, k.shape[2], arguments["blocks"]),
    }.items():
        arguments[name] = x.q.new_empty(shape, dtype=torch.float32)
    if not selecting:
        arguments["scores"] = None
    groups = k.shape[2]
    programs = groups * cdiv(heads // groups, config.rows)
    ranked, small = (cdiv(blocks, BLOCKS), groups, batch), Config(BLOCKS, 0, 4, 1)
    launch(decode_compressed_kernel, (compressed, programs, batch), arguments, constants, config)
    if selecting:
        launch(decode_importance_kernel, ranked, arguments, constants, small)
        launch(decode_rank_kernel, ranked, arguments, constants, small)
    launch(decode_parts_kernel, (first, programs, batch), arguments, constants, config)
    mix = Config(1, constants["TILE"], 1, 1)
    launch(decode_mix_kernel, (heads, batch), arguments, constants, mix)
    return arguments["out"]


def _constants(
    x: DecodeInputs, k: Tensor, v: Tensor, branches: Sequence[str]
) -> tuple[dict[str, Any], Config]:
    """Compile-time constants. Parts are numbered: blocks, then the window, then compressed keys."""
    spec, constants = x.spec, constants_of(x.q[:, None], k, v)
    config = choose_config("gathered_decode", constants.padded, x.q, SHORT)
    top = spec.select_top if "sel" in branches else 0
    window = spec.window if "win" in branches else 0
    fields = pattern(spec) | {"TOP": top, "WINDOW": window, "BLOCKS": BLOCKS}
    return {
        "C": constants._replace(ROWS=config.rows, KEYS=config.keys, **fields),
        **{"GROUP_P": padded_size(constants.GROUP), "PART": PART},
        **{"FIRST_PART": top + cdiv(window, PART), "TILE": max(1, ELEMENTS // constants.VALUE_P)},
        **{b.upper(): branches.index(b) if b in branches else -1 for b in BRANCHES},
        **{"GATES": len(branches)},
    }, config


def _buffers(x: DecodeInputs, branches: Sequence[str]) -> dict[str, Any]:
    """Keys and values by the kernels' argument names, and the stride between sequences.

    The stride may exceed a sequence's size: a cache may pass the first rows of larger buffers.
    """
    arguments: dict[str, Any] = {}
    for branch in BRANCHES:
        for name, buffer in zip(("k", "v"), x.pair(branch), strict=True):
            name = f"{name}_{branch}"
            if buffer is None or (branch not in branches and name != "k_cmp"):
                arguments |= {name: None, f"{name}_b": 0}
                continue
            if not buffer[:1].is_contiguous():
                buffer = buffer.contiguous()
            arguments |= {name: buffer, f"{name}_b": buffer.stride(0)}
    arguments["ring"] = 1 if arguments["k_win"] is None else arguments["k_win"].shape[1]
    return arguments


def _capacity(count: int) -> int:
    """Round up to a multiple of 16: Triton compiles again for sizes that are not."""
    return cdiv(count, 16) * 16


def _fake(x: DecodeInputs) -> Tensor:
    return x.q.new_empty(*x.q.shape[:2], x.pair(x.branches.split("+")[0])[1].shape[-1])


triton_decode = register("nsa::triton_decode", DecodeInputs, decode_forward, fake=_fake)
