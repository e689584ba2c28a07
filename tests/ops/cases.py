"""Cases, random inputs and comparisons for the tests of nsa.ops."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.ops import (
    compressed_attention,
    reference,
    select_blocks,
    selected_attention,
    window_attention,
)
from nsa.ops.inputs import compressed_slices, document_slices
from nsa.spec import NSASpec
from tests.inputs import Inputs as Inputs

GROUPS = (1, 2, 3, 4, 6, 8, 16)


def default(count: int, values: Iterable[Any]) -> list[Any]:
    """Parameters of a test: the first `count` values by default, the others with --full."""
    values = list(values)
    return values[:count] + [pytest.param(x, marks=pytest.mark.full) for x in values[count:]]


@dataclass(frozen=True)
class Case:
    """A sparse pattern and shapes of inputs; several lengths are packed documents."""

    spec: NSASpec
    lengths: tuple[int, ...]
    batch: int = 1
    kv_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 8
    seed: int = 0

    @property
    def seq_len(self) -> int:
        return sum(self.lengths)

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5

    @property
    def offsets(self) -> list[int] | None:
        return [0, *accumulate(self.lengths)] if len(self.lengths) > 1 else None

    @property
    def cu_seqlens(self) -> Tensor | None:
        return None if self.offsets is None else torch.tensor(self.offsets, dtype=torch.int32)

    def offsets_on(self, device: torch.device) -> Tensor | None:
        """`cu_seqlens` on this device."""
        return None if self.cu_seqlens is None else self.cu_seqlens.to(device)

    def __str__(self) -> str:
        s = self.spec
        sizes = f"l{s.block_len}d{s.block_stride}s{s.select_len}n{s.select_top}w{s.window}"
        lengths = "+".join(map(str, self.lengths))
        shape = f"b{self.batch}h{self.kv_heads}g{self.group}k{self.key_dim}v{self.value_dim}"
        return f"{sizes}-T{lengths}-{shape}"


def random_spec(draw: random.Random) -> NSASpec:
    """Small sizes that need not divide one another, mostly with more blocks than are selected."""
    block_len = draw.randint(1, 12)
    top = draw.randint(1, 5)
    local = draw.randint(1, max(1, top - 1))
    return NSASpec(
        block_len=block_len,
        block_stride=draw.randint(1, block_len),
        select_len=draw.randint(1, 9),
        select_top=top,
        init_blocks=draw.randint(0, max(0, min(2, top - local - 1))),
        local_blocks=local,
        window=draw.randint(1, 30),
    )


def random_cases(count: int, longest: int, seed: int = 0) -> list[Case]:
    """Return the same cases every time; a third packed, with empty and very short documents."""
    draw = random.Random(seed)
    cases = []
    for i in range(count):
        lengths = (draw.randint(1, longest),)
        if i % 3 == 2:
            lengths = tuple(draw.choice([0, 1, 2, draw.randint(3, longest)]) for _ in range(4))
            lengths = (*lengths, draw.randint(1, longest // 2))
        cases.append(
            Case(
                random_spec(draw),
                lengths,
                batch=1 if len(lengths) > 1 else draw.choice([1, 2]),
                kv_heads=draw.choice([1, 2, 3]),
                group=GROUPS[i % len(GROUPS)],
                key_dim=draw.choice([2, 4, 6]),
                value_dim=draw.choice([1, 3, 4, 8]),
                seed=i,
            )
        )
    return cases


Function = Callable[..., Tensor | tuple[Tensor, Tensor]]


def branches(
    x: Inputs, case: Case, block_index: Tensor, backend: str
) -> dict[str, tuple[Function, tuple[Tensor, ...]]]:
    """Each branch's attention as a function of its differentiable inputs, and these inputs."""
    common = {"cu_seqlens": case.offsets_on(x.q.device), "backend": backend}
    spec = case.spec
    return {
        "compressed": (
            lambda q, k, v: compressed_attention(q, k, v, spec, **common),
            (x.q, x.k_cmp, x.v_cmp),
        ),
        "selected": (
            lambda q, k, v: selected_attention(q, k, v, block_index, spec, **common),
            (x.q, x.k_sel, x.v_sel),
        ),
        "window": (
            lambda q, k, v: window_attention(q, k, v, spec.window, **common),
            (x.q, x.k_win, x.v_win),
        ),
    }


def with_gradients(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then gradients of the inputs from a fixed random projection of the outputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    draw = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64, device=inputs[0].device)
    for o in outputs:
        weight = torch.randn(o.shape, generator=draw, dtype=torch.float64).to(o.device)
        seen = o.double().masked_fill(o == -torch.inf, 0)
        loss = loss + (seen * weight).sum()
    loss.backward()  # and not autograd.grad, which a reentrant checkpoint refuses
    gradients = [x.grad for x in inputs if x.grad is not None]
    return [o.detach() for o in outputs] + gradients


class Calls(TorchDispatchMode):
    """Records the operators that run, with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, result))
        return result

    @property
    def names(self) -> list[str]:
        return [func.name().removeprefix("aten::") for func, _, _ in self.calls]

    @property
    def host_syncs(self) -> set[str]:
        """The operators that make the host wait for a device."""
        syncing = {"_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "item"}
        return syncing & {*self.names}


def check_calls(run: Callable[[], Any]) -> None:
    """Check the declaration of every op that `run` calls, once for arguments of a kind.

    Schema, autograd, and the shapes, dtypes and strides of what comes out. The fourth of opcheck's
    tests compiles, which takes seconds.
    """
    with Calls() as recorded:
        run()
    calls = [(op, given) for op, given, _ in recorded.calls if op.namespace == "nsa"]
    assert calls
    tests = "test_schema", "test_autograd_registration", "test_faketensor"
    kinds = {
        (op.name(), *(x.shape if isinstance(x, Tensor) else repr(x) for x in arguments)): (
            op,
            arguments,
        )
        for op, arguments in calls
    }
    for op, arguments in kinds.values():
        learned = not op.name().endswith("_backward")
        given = tuple(
            x.detach().requires_grad_(learned and x.is_floating_point())
            if isinstance(x, Tensor)
            else x
            for x in arguments
        )
        torch.library.opcheck(op, given, test_utils=tests)


def all_branches(
    x: Inputs, case: Case, block_index: Tensor, backend: str = "blockwise"
) -> list[Tensor]:
    """Outputs and gradients of the three branches, one after the other."""
    called = branches(x, case, block_index, backend).values()
    return [result for branch in called for result in with_gradients(*branch)]


def selection(x: Inputs, case: Case, backend: str, normalized: bool = True) -> Tensor:
    """The selected blocks, from the compressed branch's own lse or without one."""
    common = {"cu_seqlens": case.offsets_on(x.q.device), "backend": backend}
    if not normalized:
        return select_blocks(x.q, x.k_cmp, None, case.spec, **common)
    _, lse = compressed_attention(x.q, x.k_cmp, x.v_cmp, case.spec, **common)
    return select_blocks(x.q, x.k_cmp, lse, case.spec, **common)


def rank_score(importance: Tensor, case: Case) -> Tensor:
    """What blocks are ranked by: [B, T, K, M] with forced blocks +inf and future ones -inf."""
    score = importance.clone()
    block = torch.arange(score.shape[-1])
    for start, stop in pairwise(case.offsets or [0, case.seq_len]):
        own = (torch.arange(stop - start) // case.spec.select_len)[:, None, None]
        part = score[:, start:stop]
        forced = (block < case.spec.init_blocks) | (block > own - case.spec.local_blocks)
        part.masked_fill_(forced, torch.inf).masked_fill_(block > own, -torch.inf)
    return score


def exact_score(x: Inputs, case: Case, normalized: bool = True) -> Tensor:
    """What blocks are ranked by, from the definition in float64, on the CPU."""
    wide, cu = x.to(torch.float64), case.offsets_on(x.q.device)
    _, lse = compressed_attention(
        wide.q, wide.k_cmp, wide.v_cmp, case.spec, cu_seqlens=cu, backend="reference"
    )
    parts, widest = [], case.spec.select_blocks_len(max(case.lengths))
    documents = document_slices(case.seq_len, case.cu_seqlens)
    blocks = compressed_slices(case.seq_len, case.cu_seqlens, case.spec)
    for doc, cmp in zip(documents, blocks, strict=True):
        score = reference.importance(
            wide.q[:, doc],
            wide.k_cmp[:, cmp],
            lse[:, doc] if normalized else None,
            case.spec,
            seq_len=doc.stop - doc.start,
            scale=case.scale,
        )
        parts.append(pad(score.cpu(), (0, widest - score.shape[-1])))
    return rank_score(torch.cat(parts, 1), case)


def same_selection(score: Tensor, a: Tensor, b: Tensor, rtol: float = 1e-5) -> bool:
    """Whether two selections of blocks [.., n] are equally good by `score` [.., M].

    Where two scores are nearly equal, rounding may select either, so selections are compared by
    score. Both must name each block once, ascending, and pad with -1 at the end.
    """
    return all(_well_formed(x) for x in (a, b)) and torch.allclose(
        _selected_scores(score, a), _selected_scores(score, b), rtol=rtol, atol=1e-12
    )


def _well_formed(index: Tensor) -> bool:
    before, after = index[..., :-1], index[..., 1:]
    return bool((((before >= 0) & (after > before)) | (after == -1)).all())


def _selected_scores(score: Tensor, index: Tensor) -> Tensor:
    """The scores of selected blocks, in descending order; padding counts as worse than any."""
    selected = score.gather(-1, index.long().clamp(min=0))
    return selected.masked_fill(index < 0, -torch.inf).sort(-1, descending=True).values
