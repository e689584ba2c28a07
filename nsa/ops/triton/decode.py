"""Launcher and custom op of decoding: one new token of each sequence attends over its cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.ops.custom_op import register
from nsa.ops.triton.common import LOG2E, constants_of
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
    q_cmp: Tensor | None  # [B, Hkv, Dk]: queries of k_cmp; None: q
    k_cmp: Tensor | None
    v_cmp: Tensor | None
    k_sel: Tensor | None
    v_sel: Tensor | None
    k_win: Tensor | None
    v_win: Tensor | None
    gates: Tensor | None  # [B, Hq, branches]; None: one branch without a gate
    lengths: Tensor  # int64 [B]
    spec: NSASpec
    branches: str  # names joined by +
    scale: float

    def pair(self, branch: str) -> tuple[Tensor, Tensor]:
        """A branch's buffers of keys and values."""
        return getattr(self, f"k_{branch}"), getattr(self, f"v_{branch}")


def decode_forward(x: DecodeInputs) -> Tensor:
    """Run five kernels, fewer without a branch or with at most TOP blocks.

    Parts are numbered: blocks, then the window, then compressed keys.
    """
    (batch, heads, _), spec, branches = x.q.shape, x.spec, x.branches.split("+")
    k, v = x.pair(branches[0])
    groups, top = k.shape[2], spec.select_top if "sel" in branches else 0
    window = spec.window if "win" in branches else 0
    constants = constants_of(x.q[:, None], k, v, spec, TOP=top, WINDOW=window, BLOCKS=BLOCKS)
    config = choose_config("gathered_decode", constants.padded, x.q, SHORT)
    constants = constants._replace(ROWS=config.rows, KEYS=config.keys)
    total_blocks = 0 if x.k_sel is None else spec.select_blocks_len(x.k_sel.shape[1])
    selecting = total_blocks > top > 0
    keys = x.k_cmp.shape[1] if x.k_cmp is not None and (selecting or "cmp" in branches) else 0
    compressed, first_part = cdiv(keys, PART), top + cdiv(window, PART)
    parts, row_scores = _capacity(first_part + compressed), _capacity(keys)
    blocks, scale = _capacity(total_blocks), x.scale * LOG2E
    q, lengths = x.q.contiguous(), x.lengths.contiguous()
    gates = None if x.gates is None else x.gates.contiguous()
    # With one query head per KV head, scores rank blocks without a normalizer.
    ranking, own = (q, False) if x.q_cmp is None else (x.q_cmp.contiguous(), True)
    ranks = constants._replace(GROUP=1) if own else constants
    k_cmp, k_cmp_b = _buffer(x.k_cmp)
    v_cmp, v_cmp_b = _buffer(x.v_cmp if "cmp" in branches else None)
    k_sel, k_sel_b = _buffer(x.k_sel if "sel" in branches else None)
    v_sel, v_sel_b = _buffer(x.v_sel if "sel" in branches else None)
    k_win, k_win_b = _buffer(x.k_win if "win" in branches else None)
    v_win, v_win_b = _buffer(x.v_win if "win" in branches else None)
    out = _fake(x)
    index = q.new_empty(batch, groups, spec.select_top, dtype=torch.int32)
    o = q.new_empty(batch, heads, parts, v.shape[-1], dtype=torch.float32)
    lse = q.new_empty(batch, heads, parts, dtype=torch.float32)
    scores = None
    if selecting:
        scores = q.new_empty(batch, ranking.shape[1], row_scores, dtype=torch.float32)
    programs = groups * cdiv(heads // groups, config.rows)
    tile = max(1, ELEMENTS // constants.VALUE_P)
    launch(
        decode_compressed_kernel, (compressed, groups if own else programs, batch), config,
        q=ranking, k_cmp=k_cmp, v_cmp=v_cmp, lengths=lengths, o=o, lse=lse, scores=scores,
        k_cmp_b=k_cmp_b, v_cmp_b=v_cmp_b, parts=parts, row_scores=row_scores, scale=scale,
        C=ranks, PART=PART, FIRST_PART=first_part,
    )  # fmt: skip
    if selecting:
        importance = q.new_empty(batch, groups, blocks, dtype=torch.float32)
        grid, small = (cdiv(total_blocks, BLOCKS), groups, batch), Config(BLOCKS, 0, 4, 1)
        launch(
            decode_importance_kernel, grid, small,
            scores=scores, lse=None if own else lse, lengths=lengths, importance=importance,
            parts=parts, row_scores=row_scores, blocks=blocks, C=ranks,
            GROUP_P=padded_size(ranks.GROUP), PART=PART, FIRST_PART=first_part, TILE=tile,
        )  # fmt: skip
        launch(
            decode_rank_kernel, grid, small,
            importance=importance, lengths=lengths, index=index, blocks=blocks, C=constants,
        )  # fmt: skip
    launch(
        decode_parts_kernel, (first_part, programs, batch), config,
        q=q, k_sel=k_sel, v_sel=v_sel, k_win=k_win, v_win=v_win, index=index, lengths=lengths,
        o=o, lse=lse, k_sel_b=k_sel_b, v_sel_b=v_sel_b, k_win_b=k_win_b, v_win_b=v_win_b,
        parts=parts, ring=1 if k_win is None else k_win.shape[1], scale=scale,
        C=constants, PART=PART,
    )  # fmt: skip
    cmp, sel, win = (branches.index(b) if b in branches else -1 for b in BRANCHES)
    launch(
        decode_mix_kernel, (heads, batch), Config(1, tile, 1, 1),
        o=o, lse=lse, gates=gates, lengths=lengths, out=out, parts=parts, C=constants,
        PART=PART, FIRST_PART=first_part, TILE=tile,
        CMP=cmp, SEL=sel, WIN=win, GATES=len(branches),
    )  # fmt: skip
    return out


def _buffer(x: Tensor | None) -> tuple[Tensor | None, int]:
    """A buffer of keys or values, and the stride between sequences.

    The stride may exceed a sequence's size: a cache may pass the first rows of larger buffers.
    """
    if x is None:
        return None, 0
    x = x if x[:1].is_contiguous() else x.contiguous()
    return x, x.stride(0)


def _capacity(count: int) -> int:
    """Round up to a multiple of 16: Triton compiles again for sizes that are not."""
    return cdiv(count, 16) * 16


def _fake(x: DecodeInputs) -> Tensor:
    return x.q.new_empty(*x.q.shape[:2], x.pair(x.branches.split("+")[0])[1].shape[-1])


triton_decode = register("nsa::triton_decode", DecodeInputs, decode_forward, fake=_fake)
