"""Launchers and custom op of attention over a band of keys: the compressed and window branches."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.inputs import AttentionInputs
from nsa.ops.triton.band import band_forward_kernel, band_keys_kernel, band_queries_kernel
from nsa.ops.triton.common import (
    LOG2E,
    Constants,
    backward_rows,
    constants_of,
    document_offsets,
    max_tiles,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.flash_window import flash_forward, is_faster
from nsa.ops.triton.launch import cdiv, launch, padded_size

# A document has few tiles of compressed keys, each seen by very many queries. So several programs
# share a tile, and their float32 parts are added up in a fixed order. With 512 queries a program
# takes about as long as one of the window's keys (python -m tests.bench schedule).
QUERIES_PER_SPLIT = 512
MAX_SPLITS = 16
MAX_AXIS = 65_535  # programs of a grid's second or third axis, CUDA's limit


# Launchers take the window, the compressed branch, or both: then of the same queries, documents and
# scale. A missing branch is None.
Branch = AttentionInputs | None


def launch_forward(win: Branch, cmp: Branch) -> list[Tensor]:
    """o and lse of the window, then of the compressed branch."""
    x, config = _either(win, cmp), _config("forward", win, cmp)
    outputs = [(None, None) if y is None else outputs_like(y) for y in (win, cmp)]
    (o_win, lse_win), (o_cmp, lse_cmp) = outputs
    (k_win, v_win), (k_cmp, v_cmp) = _keys_values(win), _keys_values(cmp)
    cu, documents = document_offsets(x.cu_seqlens)
    launch(
        band_forward_kernel, _rows_grid(x, config), config,
        q=x.q.contiguous(), k_win=k_win, v_win=v_win, o_win=o_win, lse_win=lse_win,
        k_cmp=k_cmp, v_cmp=v_cmp, o_cmp=o_cmp, lse_cmp=lse_cmp, cu=cu,
        seq_len=x.q.shape[1], key_len=0 if cmp is None else cmp.k.shape[1], documents=documents,
        scale=x.scale * LOG2E, WIN=_constants(win, config), CMP=_constants(cmp, config),
    )  # fmt: skip
    return [y for pair in outputs for y in pair if y is not None]


def launch_queries(
    win: Branch, cmp: Branch, *, do: Tensor, delta: Tensor, lse2: Tensor, dq: Tensor,
    gates: Tensor | None = None, dgates: Tensor | None = None,
    o_cmp: Tensor | None = None, lse_cmp: Tensor | None = None,
    o_sel: Tensor | None = None, lse_sel: Tensor | None = None,
    o_win: Tensor | None = None, lse_win: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dq. With gates also dgates, delta and lse2 of all branches, from their o and lse."""
    x, config = _either(win, cmp), _config("queries", win, cmp, gated=gates is not None)
    (k_win, v_win), (k_cmp, v_cmp) = _keys_values(win), _keys_values(cmp)
    cu, documents = document_offsets(x.cu_seqlens)
    batch, seq_len, heads, _ = x.q.shape
    launch(
        band_queries_kernel, _rows_grid(x, config), config,
        q=x.q.contiguous(), k_win=k_win, v_win=v_win, k_cmp=k_cmp, v_cmp=v_cmp,
        do=do, o_cmp=o_cmp, o_sel=o_sel, o_win=o_win, gates=gates,
        lse_cmp=lse_cmp, lse_sel=lse_sel, lse_win=lse_win,
        dgates=dgates, delta=delta, lse2=lse2, dq=dq, cu=cu,
        seq_len=seq_len, key_len=0 if cmp is None else cmp.k.shape[1], documents=documents,
        rows=batch * seq_len * heads, scale=x.scale * LOG2E, scale_out=x.scale,
        WIN=_constants(win, config), CMP=_constants(cmp, config),
    )  # fmt: skip


def launch_keys(
    win: Branch, cmp: Branch, *, do: Tensor,
    lse2_win: Tensor | None = None, delta_win: Tensor | None = None,
    lse2_cmp: Tensor | None = None, delta_cmp: Tensor | None = None,
    one_tile: tuple[int, int] | None = None, lse_cmp: Tensor | None = None,
    gates: Tensor | None = None, dgates: Tensor | None = None, dq: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """dk and dv of the window, then of the compressed branch.

    `one_tile`: rows and keys of a tile with all compressed keys. It needs lse_cmp and gates instead
    of lse2_cmp and delta_cmp, writes the compressed branch's dgates and adds to dq.
    """
    x, config = _either(win, cmp), _config("keys", win, cmp)
    (batch, seq_len), groups = x.q.shape[:2], x.k.shape[2]
    rows, keys = one_tile or config[:2]
    if one_tile and config.warps <= 4:  # half the rows, or registers spill
        rows = max(16, rows // 2)
    dk_win = dv_win = dk_cmp = dv_cmp = None
    window_tiles, key_len, split_len, cmp_tiles, cmp_programs = 0, 0, seq_len, 1, 0
    if win is not None:
        window_tiles = max_tiles(seq_len, config.keys, x.cu_seqlens)
        dk_win, dv_win = _parts(win, 1)
    if cmp is not None:
        splits = min(MAX_SPLITS, cdiv(seq_len, QUERIES_PER_SPLIT))
        split_len, key_len = cdiv(seq_len, splits), cmp.k.shape[1]
        cmp_tiles = max_tiles(seq_len, keys * cmp.spec.block_stride, x.cu_seqlens)
        cmp_programs = cmp_tiles * splits
        dk_cmp, dv_cmp = _parts(cmp, splits)
    (k_win, v_win), (k_cmp, v_cmp) = _keys_values(win), _keys_values(cmp)
    cu, documents = document_offsets(x.cu_seqlens)
    programs = cmp_programs + window_tiles
    # Programs beyond these, in the last row of the grid, have no keys.
    grid = groups * batch, min(programs, MAX_AXIS), cdiv(programs, MAX_AXIS)
    launch(
        band_keys_kernel, grid, config,
        q=x.q.contiguous(), k_win=k_win, v_win=v_win, k_cmp=k_cmp, v_cmp=v_cmp, do=do,
        lse2_win=lse2_win, delta_win=delta_win, lse2_cmp=lse2_cmp, delta_cmp=delta_cmp,
        lse_cmp=lse_cmp, dk_win=dk_win, dv_win=dv_win, dk_cmp=dk_cmp, dv_cmp=dv_cmp,
        gates=gates, dgates=dgates, dq=dq, cu=cu,
        seq_len=seq_len, key_len=key_len, documents=documents, split_len=split_len,
        cmp_tiles=cmp_tiles, cmp_programs=cmp_programs, scale=x.scale * LOG2E, scale_out=x.scale,
        WIN=_constants(win, config), CMP=_constants(cmp, config, rows, keys),
    )  # fmt: skip
    gradients = [y for y in (dk_win, dv_win, dk_cmp, dv_cmp) if y is not None]
    return [y[0] if y.shape[0] == 1 else y.sum(0).to(x.k.dtype) for y in gradients]


def _either(win: Branch, cmp: Branch) -> AttentionInputs:
    x = cmp if win is None else win
    assert x is not None
    return x


def _config(kernel: str, win: Branch, cmp: Branch, gated: bool = False) -> Config:
    """The tile sizes of a kernel."""
    x, both = _either(win, cmp), win is not None and cmp is not None
    name = "gated" if gated or both else "compressed" if win is None else "window"
    sizes = padded_size(x.q.shape[3]), padded_size(x.v.shape[3])
    return choose_config(f"{name}_{kernel}", sizes, x.q, x.q.shape[1])


def _keys_values(x: Branch) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if x is None else (x.k.contiguous(), x.v.contiguous())


def _constants(x: Branch, config: Config, rows: int = 0, keys: int = 0) -> Constants | None:
    """The constants of a branch's tiles, which have the config's rows and keys unless given."""
    if x is None:
        return None
    rows, keys, spec = rows or config.rows, keys or config.keys, x.spec
    if x.branch == "window":
        return constants_of(x.q, x.k, x.v, ROWS=rows, KEYS=keys, WINDOW=spec.window)
    length, stride = spec.block_len, spec.block_stride
    return constants_of(x.q, x.k, x.v, ROWS=rows, KEYS=keys, LEN=length, STRIDE=stride)


def _rows_grid(x: AttentionInputs, config: Config) -> tuple[int, ...]:
    batch, seq_len, heads, _ = x.q.shape
    groups = x.k.shape[2]
    return max_tiles(seq_len * (heads // groups), config.rows, x.cu_seqlens), groups, batch


def _parts(x: AttentionInputs, splits: int) -> tuple[Tensor, Tensor]:
    """Uninitialised dk and dv of a branch, [splits, B, N, Hkv, ..]."""
    # k may have more rows than the documents have compressed keys: cu_seqlens on a device is not
    # checked. No kernel writes the gradients of those rows.
    packed = x.cu_seqlens is not None and x.branch == "compressed"
    empty = torch.zeros if packed else torch.empty
    dtype = torch.float32 if splits > 1 else x.k.dtype
    dk, dv = (empty(splits, *y.shape, dtype=dtype, device=y.device) for y in (x.k, x.v))
    return dk, dv


def band_forward(x: AttentionInputs) -> tuple[Tensor, ...]:
    """(o, lse)."""
    if x.branch == "compressed":
        return tuple(launch_forward(None, x))
    if is_faster(x.q, x.v):
        q, k, v = (y.contiguous() for y in (x.q, x.k, x.v))
        return flash_forward(q, k, v, x.cu_seqlens, x.spec.window, x.scale)
    return tuple(launch_forward(x, None))


def band_backward(
    do: Tensor, dlse: Tensor, x: AttentionInputs, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    do = do.contiguous()
    delta, lse2 = backward_rows(do, o, lse, dlse)
    if x.branch == "window":
        launch_queries(x, None, do=do, delta=delta, lse2=lse2, dq=dq)
        dk, dv = launch_keys(x, None, do=do, lse2_win=lse2, delta_win=delta)
    else:
        launch_queries(None, x, do=do, delta=delta, lse2=lse2, dq=dq)
        dk, dv = launch_keys(None, x, do=do, lse2_cmp=lse2, delta_cmp=delta)
    return dq, dk, dv


def outputs_like(x: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Uninitialised (o, lse) of attention."""
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    return x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), lse


triton_band = register(
    "nsa::triton_band",
    AttentionInputs,
    band_forward,
    fake=outputs_like,
    outputs=2,
    gradient=Gradient(band_backward, inputs=3, outputs=2),
)
