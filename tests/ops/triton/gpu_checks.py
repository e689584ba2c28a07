"""Checks for test_gpu.py as functions of sizes: real ones on a GPU, small ones when interpreted."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nsa.ops import NSASpec, compressed_attention, nsa_attention, reference
from nsa.ops.inputs import AttentionInputs, compressed_slices, document_slices
from nsa.ops.triton.configs import Config
from tests.ops.cases import Case, branches, exact_score, same_selection, selection, with_gradients
from tests.ops.tiles import override_choices
from tests.ops.triton.parity import (
    BRANCHES,
    DENSE,
    DEVICE,
    GATHERED,
    assert_exact_enough,
    computed,
    inputs,
    settings,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SANITIZED = 150, (torch.float16, torch.float32)  # sizes of the calls under compute-sanitizer


def seen_by(case: Case, branch: str, index: Tensor) -> Tensor:
    """What each query sees in a branch: bool [B or 1, heads or 1, T, keys]."""
    spec, cu, x = case.spec, case.cu_seqlens, inputs(case)
    blocks = index if branch == "selected" else None
    given = AttentionInputs(x.q, x.k_sel, x.v_sel, blocks, cu, branch, spec, case.scale)
    documents = keys = document_slices(case.seq_len, cu)
    if branch == "compressed":
        keys = compressed_slices(case.seq_len, cu, spec)
    batch, heads = (case.batch, case.heads) if branch == "selected" else (1, 1)
    shape = batch, heads, case.seq_len, keys[-1].stop
    seen = torch.zeros(shape, dtype=torch.bool, device=DEVICE)
    for rows, columns in zip(documents, keys, strict=True):
        by_group = reference._visible(given, rows).transpose(1, 2)
        seen[:, :, rows, columns] = by_group.repeat_interleave(heads // by_group.shape[1], 1)
    return seen


def plain(seen: Tensor) -> Attend:
    """PyTorch's own attention under a mask; 0 where nothing is seen."""
    sees_any = seen.any(-1, keepdim=True)
    mask = seen | ~sees_any

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.where(sees_any, o, 0).transpose(1, 2)

    return attend


def loses_no_more_than_plain_attention(
    case: Case, dtype: torch.dtype, backend: str = "triton"
) -> None:
    """Every branch and the kernels' gated sum, forward and backward, against float64."""
    x = inputs(case, dtype)
    wide, cu = x.to(torch.float64), case.offsets_on(DEVICE)
    index = selection(x, case, backend)
    ranked, best = exact_score(x, case), selection(wide, case, "reference")
    assert same_selection(ranked, index.cpu(), best.cpu(), rtol=1e-4)
    usual = {branch: plain(seen_by(case, branch, index)) for branch in BRANCHES}
    actual, exact = branches(x, case, index, backend), branches(wide, case, index, "reference")
    for branch in BRANCHES:
        function, tensors = actual[branch]
        assert_exact_enough(
            with_gradients(lambda *y, f=function: _first(f(*y)), tensors),
            with_gradients(usual[branch], tensors),
            with_gradients(lambda *y, f=exact[branch][0]: _first(f(*y)), exact[branch][1]),
            f"{branch} {dtype}",
        )

    if backend != "triton":  # which rounds each branch before it adds them up
        return

    def gated(attends: dict[str, Callable[..., Tensor | tuple[Tensor, Tensor]]]) -> Attend:
        def mixed(q: Tensor, *rest: Tensor) -> Tensor:
            *pairs, gates = rest
            parts = zip(gates.unbind(-1), BRANCHES, pairs[::2], pairs[1::2], strict=True)
            return sum(g[..., None] * _first(attends[b](q, k, v)) for g, b, k, v in parts)

        return mixed

    assert_exact_enough(
        with_gradients(
            lambda *y: nsa_attention(*y, case.spec, cu_seqlens=cu, backend=backend), x.tensors()
        ),
        with_gradients(gated(usual), x.tensors()),
        with_gradients(gated({b: function for b, (function, _) in exact.items()}), wide.tensors()),
        f"mixed {dtype}",
    )


def _first(result: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def lse_is_nearly_exact(case: Case, dtype: torch.dtype, backend: str = "triton") -> None:
    x = inputs(case, dtype)
    options = {"cu_seqlens": case.offsets_on(DEVICE)}
    lse, exact = (
        compressed_attention(y.q, y.k_cmp, y.v_cmp, case.spec, **options, backend=name)[1]
        for y, name in ((x, backend), (x.to(torch.float64), "reference"))
    )
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact, rtol=1e-5, atol=1e-5)


def runs_are_the_same_to_the_bit(case: Case, dtype: torch.dtype, times: int) -> None:
    x = inputs(case, dtype)
    index = selection(x, case, "triton")
    first = computed(case, "mixed", "triton", x)
    for _ in range(times - 1):
        assert torch.equal(selection(x, case, "triton"), index)
        torch.testing.assert_close(computed(case, "mixed", "triton", x), first, rtol=0, atol=0)


def small_calls(longest: int, dtypes: Sequence[torch.dtype]) -> None:
    """Run every attention kernel with every tiling and split, for compute-sanitizer."""
    spec = NSASpec(8, 4, 16, 3, 1, 1, 24)
    one = Case(spec, (longest,), kv_heads=2, group=3, key_dim=16, value_dim=16)
    packed = Case(spec, (1, longest // 2, 0, 11), kv_heads=1, group=6, key_dim=24, value_dim=16)
    for case, tiling, dtype in product((one, packed), (GATHERED, DENSE), dtypes):
        with settings(**tiling, chunk=16, queries_per_split=32):
            for branch in (*BRANCHES, "mixed"):
                computed(case, branch, "triton", inputs(case, dtype))


def sanitized_calls(longest: int, dtypes: Sequence[torch.dtype]) -> None:
    """Also with 32 keys and four warps: Triton read such operands out of bounds (issue 11366)."""
    with override_choices(_narrow):
        small_calls(longest, dtypes[:1])
    small_calls(longest, dtypes)


def _narrow(_: str, options: list[Any]) -> Any:
    first = options[0]
    return replace(first, keys=32, warps=4) if isinstance(first, Config) else first


def races(output: str) -> list[str]:
    """Racecheck's errors other than two writes of one address, which Triton's reductions have.

    Lanes that hold the same partial sum all write it, and its last bit may differ (issue 7264).
    """
    return re.findall(r"Error: .*Potential (?:RAW|WAR) hazard.*", output)


if __name__ == "__main__":
    sanitized_calls(*SANITIZED)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
