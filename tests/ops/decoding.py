"""Sequences as the buffers of a cache, a token decoded from them, and its definition."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nsa.constants import BRANCHES
from nsa.ops import nsa_attention, select_blocks, selected_attention
from nsa.ops.decode import decode_attention
from nsa.ops.inputs import DecodeInputs
from tests.ops.cases import Case, Inputs


@cache
def sequences(case: Case, dtype: torch.dtype) -> list[Inputs]:
    """All positions of one sequence of each length."""
    return [
        Inputs.of(replace(case, lengths=(length,), seed=case.seed + length)).to(dtype)
        for length in case.lengths
    ]


def buffers(case: Case, full: Sequence[Inputs], spare: int = 5, ring: int | None = None) -> Inputs:
    """A cache at each sequence's last token, NaN beyond its length and before its window."""
    window, longest = case.spec.window, max(case.lengths) + spare
    rows = {"cmp": case.spec.compressed_len(longest), "sel": longest, "win": ring or window}

    def buffer(name: str) -> Tensor:
        length, parts = rows[name[2:]], [getattr(x, name)[0] for x in full]
        out = parts[0].new_full((len(parts), length, *parts[0].shape[1:]), torch.nan)
        for i, part in enumerate(parts):
            position = torch.arange(len(part), device=part.device)
            if name[2:] == "win":
                position = position[-window:]
            out[i, position % length] = part[position]
        return out

    kept = {f"{kind}_{branch}": buffer(f"{kind}_{branch}") for branch in BRANCHES for kind in "kv"}
    q, gates = (torch.stack([getattr(x, name)[0, -1] for x in full]) for name in ("q", "gates"))
    return Inputs(q=q, gates=gates, **kept)


def decoded(
    case: Case, x: Inputs, names: Sequence[str] = BRANCHES, backend: str = "auto", **changes: Any
) -> Tensor:
    """`decode_attention`; buffers that the branches `names` do not read are None."""
    read = {f"{kind}_{name}" for name in names for kind in "kv"}
    read |= {"k_cmp"} if "sel" in names else set()
    given: dict[str, Any] = {name: y if name in read else None for name, y in vars(x).items()}
    given |= {"q": x.q, "q_cmp": None, "scale": x.q.shape[-1] ** -0.5, "branches": "+".join(names)}
    given["gates"] = x.gates[..., [BRANCHES.index(name) for name in names]]
    lengths = torch.tensor([(length, 0) for length in case.lengths], device=x.q.device)
    given["lengths"] = lengths[:, 0]  # a view that is not contiguous
    return decode_attention(DecodeInputs(**(given | changes), spec=case.spec), backend)


def defined(case: Case, full: Sequence[Inputs], names: Sequence[str] = BRANCHES) -> Tensor:
    """The last positions by the definition; branches not in `names` have gate 0."""
    tokens = []
    for x in full:
        used = x.gates.new_tensor([float(branch in names) for branch in BRANCHES])
        *rest, gates = x.tensors()
        tokens.append(nsa_attention(*rest, gates * used, case.spec, backend="reference")[0, -1])
    return torch.stack(tokens)


def by_own_queries(case: Case, x: Inputs, **changes: Any) -> Tensor:
    """The selected branch without gates, whose blocks the first heads of q rank."""
    queries = {"q_cmp": x.q[:, : case.kv_heads], "gates": None}
    return decoded(case, x, ("sel",), **(queries | changes))


def defined_by_own_queries(case: Case, full: Sequence[Inputs]) -> Tensor:
    """The same, from the full sequences by the definition."""
    tokens, options = [], {"backend": "reference"}
    for x in full:
        blocks = select_blocks(x.q[:, :, : case.kv_heads], x.k_cmp, None, case.spec, **options)
        o = selected_attention(x.q, x.k_sel, x.v_sel, blocks, case.spec, **options)
        tokens.append(o[0, -1])
    return torch.stack(tokens)
