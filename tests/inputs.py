"""The tensors of nsa.ops' functions, by their names; imports PyTorch alone."""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.ops.cases import Case


@dataclass
class Inputs:
    """Arguments of `nsa_attention`, in order."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor

    @classmethod
    def of(cls, case: "Case", dtype: torch.dtype = torch.float64) -> "Inputs":
        """Normal numbers, and gates in (0, 1)."""
        draw = torch.Generator().manual_seed(case.seed)

        def normal(length: int, heads: int, size: int) -> Tensor:
            shape = (case.batch, length, heads, size)
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

        blocks = sum(case.spec.compressed_len(length) for length in case.lengths)
        pairs = [
            normal(length, case.kv_heads, size)
            for length in (blocks, case.seq_len, case.seq_len)
            for size in (case.key_dim, case.value_dim)
        ]
        gates = normal(case.seq_len, case.heads, 3).sigmoid()
        return cls(normal(case.seq_len, case.heads, case.key_dim), *pairs, gates)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))

    def to(self, target: torch.dtype | torch.device | str) -> "Inputs":
        return Inputs(*(x.to(target) for x in self.tensors()))
