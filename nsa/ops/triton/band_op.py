"""Launchers and custom op of attention over a band of keys: the compressed and window branches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.ops.custom_op import Gradient, register
from nsa.ops.triton.band import band_forward_kernel, band_keys_kernel, band_queries_kernel
from nsa.ops.triton.common import (
    LOG2E,
    Constants,
    backward_rows,
    constants_of,
    document_arguments,
    slots,
)
from nsa.ops.triton.configs import Config, choose_config
from nsa.ops.triton.flash_window import flash_forward, is_faster
from nsa.ops.triton.launch import cdiv, launch, padded_size

# A document has few tiles of compressed keys, each seen by very many queries. So several programs
# share a tile, and their float32 parts are added up in a fixed order. With 512 queries a program
# takes about as long as one of the window's keys (python -m nsa.bench schedule).
QUERIES_PER_SPLIT = 512
MAX_SPLITS = 16
MAX_AXIS = 65_535  # programs of a grid's second or third axis, CUDA's limit


class Band(NamedTuple):
    """Inputs of the op; `band` is [LEN, STRIDE, WINDOW] of band.py."""

    q: Tensor  # [B, T, Hq, Dk]
    k: Tensor  # [B, N, Hkv, Dk]
    v: Tensor  # [B, N, Hkv, Dv]
    cu_seqlens: Tensor | None
    band: list[int]
    scale: float

    def constants(self, rows: int, keys: int) -> Constants:
        """The kernels' constants, for tiles of these sizes."""
        length, stride, window = self.band
        band = {"LEN": length, "STRIDE": stride, "WINDOW": window}
        return constants_of(self.q, self.k, self.v, ROWS=rows, KEYS=keys, **band)


class Bands(NamedTuple):
    """What one launch computes: the window, the compressed branch, or both of the same queries."""

    name: str  # of the tile sizes: window, compressed or gated
    win: Band | None
    cmp: Band | None

    @classmethod
    def alone(cls, x: Band) -> Bands:
        """One branch alone."""
        return cls("window", x, None) if x.band[2] else cls("compressed", None, x)

    def present(self) -> Band:
        """A branch that is not None; both have the same queries, documents and scale."""
        x = self.cmp if self.win is None else self.win
        assert x is not None
        return x

    def config(self, kernel: str) -> Config:
        """The tile sizes of a kernel."""
        x = self.present()
        sizes = padded_size(x.q.shape[3]), padded_size(x.v.shape[3])
        return choose_config(f"{self.name}_{kernel}", sizes, x.q, x.q.shape[1])

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: dict[str, Any],
        config: Config,
        cmp_tile: tuple[int, int] | None = None,
    ) -> None:
        """Launch with these arguments and those that all kernels take, None for a missing branch.

        `cmp_tile`: rows and keys of the compressed branch's tiles, where they are not `config`'s.
        """
        x, constants = self.present(), dict[str, Constants | None](WIN=None, CMP=None)
        arguments = dict.fromkeys(kernel.arg_names) | arguments
        for name, y, tile in (("win", self.win, None), ("cmp", self.cmp, cmp_tile)):
            if y is not None:
                arguments |= {f"k_{name}": y.k.contiguous(), f"v_{name}": y.v.contiguous()}
                constants[name.upper()] = y.constants(*(tile or config[:2]))
        arguments |= {"q": x.q.contiguous(), **document_arguments(x.q.shape[1], x.cu_seqlens)}
        arguments |= {"key_len": 0 if self.cmp is None else self.cmp.k.shape[1]}
        arguments |= {"scale": x.scale * LOG2E, "scale_out": x.scale}
        launch(kernel, grid, arguments, constants, config)

    def forward(self) -> tuple[Tensor, ...]:
        """o and lse of the window, then of the compressed branch."""
        outputs: dict[str, Tensor] = {}
        for name, x in (("win", self.win), ("cmp", self.cmp)):
            if x is not None:
                outputs[f"o_{name}"], outputs[f"lse_{name}"] = outputs_like(x)
        self._launch_rows(band_forward_kernel, outputs, self.config("forward"))
        return tuple(outputs.values())

    def query_gradients(self, per_query: dict[str, Tensor]) -> None:
        """Write dq, and with gates what `_branch_rows` stores; `per_query`: its other arguments."""
        self._launch_rows(band_queries_kernel, per_query, self.config("queries"))

    def _launch_rows(self, kernel: Any, arguments: dict[str, Tensor], config: Config) -> None:
        x = self.present()
        batch, seq_len, heads, _ = x.q.shape
        tiles = slots(seq_len * (heads // x.k.shape[2]), config.rows, x.cu_seqlens)
        rows = {"rows": batch * seq_len * heads}
        self.launch(kernel, (tiles, x.k.shape[2], batch), arguments | rows, config)

    def key_gradients(
        self, per_query: dict[str, Tensor], cmp_tile: tuple[int, int] | None = None
    ) -> list[Tensor]:
        """dk, dv of the window, then of the compressed branch; `per_query`: arguments by query."""
        x, config = self.present(), self.config("keys")
        if cmp_tile and config.warps <= 4:  # half the rows, or registers spill
            cmp_tile = max(16, cmp_tile[0] // 2), cmp_tile[1]
        seq_len, gradients = x.q.shape[1], dict[str, Tensor]()
        counts = {"split_len": seq_len, "cmp_tiles": 1, "cmp_programs": 0}
        window_tiles = 0
        if self.win is not None:
            window_tiles = slots(seq_len, config.keys, x.cu_seqlens)
            gradients |= _parts("win", self.win, 1)
        if self.cmp is not None:
            splits = min(MAX_SPLITS, cdiv(seq_len, QUERIES_PER_SPLIT))
            keys = (cmp_tile or config)[1]
            tiles = slots(seq_len, keys * self.cmp.band[1], x.cu_seqlens)
            counts = {"split_len": cdiv(seq_len, splits), "cmp_tiles": tiles}
            counts |= {"cmp_programs": tiles * splits}
            gradients |= _parts("cmp", self.cmp, splits)
        programs = counts["cmp_programs"] + window_tiles
        # Programs beyond these, in the last row of the grid, have no keys.
        grid = x.k.shape[2] * x.q.shape[0], min(programs, MAX_AXIS), cdiv(programs, MAX_AXIS)
        self.launch(band_keys_kernel, grid, per_query | gradients | counts, config, cmp_tile)
        return [y[0] if y.shape[0] == 1 else y.sum(0).to(x.k.dtype) for y in gradients.values()]


def _parts(name: str, x: Band, splits: int) -> dict[str, Tensor]:
    """Uninitialised dk and dv of a branch, [splits, B, N, Hkv, ..]."""
    # k may have more rows than the documents have compressed keys: cu_seqlens on a device is not
    # checked. No kernel writes the gradients of those rows.
    empty = torch.zeros if x.cu_seqlens is not None and not x.band[2] else torch.empty
    dtype = torch.float32 if splits > 1 else x.k.dtype
    return {
        f"{d}_{name}": empty(splits, *y.shape, dtype=dtype, device=y.device)
        for d, y in (("dk", x.k), ("dv", x.v))
    }


def band_forward(x: Band) -> tuple[Tensor, ...]:
    """(o, lse)."""
    if x.band[2] and is_faster(x.q, x.v):
        q, k, v = (y.contiguous() for y in (x.q, x.k, x.v))
        return flash_forward(q, k, v, x.cu_seqlens, x.band[2], x.scale)
    return Bands.alone(x).forward()


def band_backward(
    do: Tensor, dlse: Tensor, x: Band, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; the same from run to run."""
    dq = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    do = do.contiguous()
    delta, lse2 = backward_rows(do, o, lse, dlse)
    Bands.alone(x).query_gradients({"do": do, "delta": delta, "lse2": lse2, "dq": dq})
    branch = "win" if x.band[2] else "cmp"
    per_query = {"do": do, f"delta_{branch}": delta, f"lse2_{branch}": lse2}
    dk, dv = Bands.alone(x).key_gradients(per_query)
    return dq, dk, dv


def outputs_like(x: Any) -> tuple[Tensor, Tensor]:
    """Uninitialised (o, lse) of attention."""
    lse = x.q.new_empty(x.q.shape[:3], dtype=torch.float32)
    return x.q.new_empty(*x.q.shape[:3], x.v.shape[-1]), lse


triton_band = register(
    "nsa::triton_band",
    Band,
    band_forward,
    fake=outputs_like,
    outputs=2,
    gradient=Gradient(band_backward, inputs=3, outputs=2),
)
