"""Checks at real sizes, which need a GPU."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from nsa.constants import BRANCHES
from nsa.model.attention import HAS_FLASH_ATTN, causal_attention, flash_attn_supports
from nsa.ops import fallback_counts, nsa_attention, reset_fallback_counts
from nsa.ops.decode import decode_attention
from nsa.ops.inputs import DecodeInputs
from nsa.ops.triton import decode
from nsa.ops.triton.configs import chip_of
from nsa.spec import NSASpec
from tests.compile import check as compile_check
from tests.compile import launches as kernel_launches
from tests.kernel_launches import Launch, recording
from tests.ops.cases import Case
from tests.ops.decoding import buffers, decoded
from tests.ops.test_decode import loses_what_pytorch_loses, sequences
from tests.ops.triton import gpu_checks
from tests.ops.triton.parity import DEVICE, inputs

ROOT = Path(__file__).parents[3]
M7C = Case(NSASpec(), (4096,), kv_heads=2, group=6, key_dim=64, value_dim=64)
LARGE = Case(NSASpec(), (2048,), kv_heads=4, group=16, key_dim=128, value_dim=128)
REAL = {
    "M7C": M7C,
    "M7C, an odd length": replace(M7C, lengths=(1999,)),
    "M7C, packed": replace(M7C, lengths=(1000, 1, 0, 2047, 31, 1001)),
    "M7C, batch of 3": replace(M7C, lengths=(1024,), batch=3),
    "64/4/128": LARGE,
    "64/4/192/128": replace(LARGE, lengths=(1500,), key_dim=192),
    "one head each": replace(LARGE, lengths=(2048,), kv_heads=8, group=1),
    "few blocks": replace(M7C, spec=NSASpec(select_top=4, window=64), lengths=(3000,)),
    "long lists and splits": replace(M7C, lengths=(9001,), kv_heads=1, group=2),
    "head size 256": replace(M7C, lengths=(1024,), key_dim=256, value_dim=256),
    "head size 16": replace(M7C, lengths=(2048,), key_dim=16, value_dim=16),
}
DECODED = {
    "M7C": replace(M7C, lengths=(1, 1500, 9000, 16_384)),
    "64/4/192/128": replace(LARGE, lengths=(700, 5000), key_dim=192),
    "head size 256": replace(REAL["head size 256"], lengths=(40, 3001), kv_heads=1, group=2),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

ATTENTION = kernel_launches.PARTS  # what the tests call
# float16 has bfloat16's tiles, so that a few cases are enough; each takes compiling.
IN_EVERY_DTYPE = ("M7C", "M7C, packed", "64/4/128", "64/4/192/128", "head size 256")


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """Compile every kernel of the selected cases on all CPU cores: one core takes minutes."""
    calls = {
        call
        for item in request.session.items
        if "compiled" in item.fixturenames
        for call in calls_of(REAL[item.callspec.params["name"]], item.callspec.params["dtype"])
    }
    chip = chip_of(torch.device("cuda", torch.cuda.current_device()))
    compile_all((call, x) for call in calls for x in kernel_launches.record_launches(call, 1, chip))


def compile_all(launches: Iterable[tuple[kernel_launches.Case, Launch]]) -> None:
    """Compile into Triton's cache for this GPU."""
    chip = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if chip in compile_check.CHIPS:
        compile_check.check(
            [(call, launch, chip) for call, launch in launches], jobs=min(os.cpu_count() or 1, 16)
        )


def calls_of(case: Case, dtype: torch.dtype) -> list[kernel_launches.Case]:
    """A case's calls, as the compile check names them."""
    heads, sizes = (case.heads, case.kv_heads), (case.key_dim, case.value_dim)
    name = next(name for name, known in kernel_launches.DTYPES.items() if known == dtype)
    packed = case.offsets is not None
    return [
        kernel_launches.Case(operation, *heads, *sizes, case.seq_len, name, packed, case.spec)
        for operation in ATTENTION
    ]


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in REAL]
    + [(name, dtype) for dtype in DTYPES[1:] for name in IN_EVERY_DTYPE],
    ids=str,
)
def test_the_loss_of_precision_at_real_sizes_is_that_of_pytorchs_attention(
    name: str, dtype: torch.dtype
) -> None:
    gpu_checks.loses_no_more_than_plain_attention(REAL[name], dtype)
    gpu_checks.lse_is_nearly_exact(REAL[name], dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@dtypes
@pytest.mark.parametrize("name", ["M7C", "M7C, packed", "few blocks", "64/4/128"])
def test_twenty_runs_at_real_sizes_give_the_same_bits(name: str, dtype: torch.dtype) -> None:
    gpu_checks.runs_are_the_same_to_the_bit(REAL[name], dtype, times=20)


@pytest.mark.gpu
def test_auto_takes_the_kernels_and_counts_no_fallback() -> None:
    x = inputs(M7C, torch.bfloat16)
    reset_fallback_counts()
    auto, named = (nsa_attention(*x.tensors(), M7C.spec, backend=b) for b in ("auto", "triton"))
    assert torch.equal(auto, named)
    assert fallback_counts() == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["M7C", "M7C, packed"])
def test_a_step_never_waits_for_the_gpu(name: str) -> None:
    case = REAL[name]
    x, cu = inputs(case, torch.bfloat16), case.offsets_on(DEVICE)
    tensors = [y.requires_grad_() for y in x.tensors()]

    def step() -> None:
        o = nsa_attention(*tensors, case.spec, cu_seqlens=cu)
        o.backward(o.detach())

    step()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.fixture(scope="module")
def sanitized_compiled() -> None:
    """Compile every kernel that compute-sanitizer will run, on all CPU cores."""
    with recording() as launches:
        gpu_checks.sanitized_calls(*gpu_checks.SANITIZED)
    compile_all((calls_of(M7C, torch.float16)[0], launch) for launch in launches)


@pytest.mark.gpu
@pytest.mark.usefixtures("sanitized_compiled")
@pytest.mark.parametrize(
    ("tool", "flags"),
    [
        ("memcheck", ["--error-exitcode", "9"]),
        ("racecheck", ["--racecheck-report", "hazard", "--print-limit", "100000"]),
    ],
    ids=["memcheck", "racecheck"],
)
def test_compute_sanitizer_finds_nothing(tool: str, flags: list[str]) -> None:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        pytest.skip("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    calls = [sys.executable, "-m", "tests.ops.triton.gpu_checks"]
    process = subprocess.run(
        [sanitizer, "--tool", tool, *flags, *calls],
        cwd=ROOT,
        # Allocate each tensor separately, so that the first byte beyond one is noticed.
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
        timeout=240,  # both within the stage's time in launch/gpu.sh
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-2000:]
    assert gpu_checks.races(process.stdout)[:20] == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attn_attends_within_documents_as_pytorch_does(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, with an empty document; the error is at most twice PyTorch's."""
    if not HAS_FLASH_ATTN:
        pytest.skip("flash-attn is not installed")
    cu_seqlens = torch.tensor([0, 5, 5, 70, 200], dtype=torch.int32, device="cuda")
    exact = [torch.randn(1, 200, heads, 64, dtype=torch.float64) for heads in (4, 2, 2, 4)]
    results = {}
    for name, kind in (("exact", torch.float64), ("flash-attn", dtype), ("PyTorch", dtype)):
        q, k, v = (x.to("cuda", kind).requires_grad_() for x in exact[:3])
        assert flash_attn_supports(q, v) == (name == "flash-attn")
        o = causal_attention(q, k, v, cu_seqlens)
        o.backward(exact[3].to(o))
        results[name] = [x.double() for x in (o, q.grad, k.grad, v.grad)]
        if name == "flash-attn":
            monkeypatch.setattr("nsa.model.attention.HAS_FLASH_ATTN", False)
    for expected, flash, torch_ in zip(*results.values(), strict=True):
        assert (flash - expected).abs().max() <= 2 * (torch_ - expected).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.bfloat16) for name in DECODED), ("M7C", torch.float32)],
    ids=str,
)
def test_decoding_at_real_sizes_loses_what_pytorch_loses(name: str, dtype: torch.dtype) -> None:
    with mock.patch.multiple(decode, PART=128, BLOCKS=64, ELEMENTS=2048):
        loses_what_pytorch_loses(DECODED[name], dtype)


@pytest.mark.gpu
def test_a_captured_step_of_decoding_is_right_for_other_tokens_and_lengths() -> None:
    case = DECODED["M7C"]
    x = buffers(case, sequences(case, dtype=torch.bfloat16))
    lengths = torch.tensor(case.lengths, device=DEVICE)
    expected = decoded(case, x, backend="triton")
    q, *kv_and_gates = [y.clone() for y in x.tensors()]
    scale, counts = q.shape[-1] ** -0.5, torch.ones_like(lengths)
    q.zero_()
    given = DecodeInputs(q, None, *kv_and_gates, counts, case.spec, "+".join(BRANCHES), scale)
    decode_attention(given, "triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = decode_attention(given, "triton")
    q.copy_(x.q)
    counts.copy_(lengths)
    graph.replay()
    assert torch.equal(o, expected)
