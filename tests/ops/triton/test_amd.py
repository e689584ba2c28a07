"""AMD's chips: which tiles, warps and binaries a ROCm build of torch takes; nothing runs on one."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from nsa.monitor import environment as run_environment
from nsa.ops import triton as backend
from nsa.ops.per_token import cross_entropy_
from nsa.ops.triton.configs import amd_chip, chip_of, warp_size
from tests.kernel_launches import recording
from tests.ops.tiles import choosing_for

GPU = torch.device("cuda", 0)
OnChip = Callable[[str], None]


@pytest.fixture
def on_chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnChip]:
    """Let torch be a ROCm build that sees this chip."""

    def plant(name: str) -> None:  # perhaps with features
        chip_of.cache_clear()
        gpu = SimpleNamespace(gcnArchName=name)
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
        # What ROCm reports for gfx942; a gfx1100 has 11.0, as if it were newer than sm_100.
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))

    yield plant
    chip_of.cache_clear()


@pytest.mark.parametrize("features", ["", ":sramecc+:xnack-", ":xnack+"])
@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_a_chip_of_amds_takes_the_tiles_of_gfx942(
    name: str, features: str, on_chip: OnChip
) -> None:
    on_chip(name + features)
    assert (amd_chip(GPU), chip_of(GPU), warp_size(GPU)) == (name, "gfx942", 64)
    assert backend._find_device_problem.__wrapped__(GPU) is None


def test_another_chip_of_amds_is_refused_by_name(on_chip: OnChip) -> None:
    on_chip("gfx1100:sramecc-")
    reason = "the GPU is AMD's gfx1100; of AMD's GPUs it supports gfx942, gfx950"
    assert backend._find_device_problem.__wrapped__(GPU) == reason


def test_an_old_triton_is_refused_on_amds_chips(
    on_chip: OnChip, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_chip("gfx942")
    monkeypatch.setattr(backend, "find_spec", lambda name: None if "target_info" in name else name)
    assert backend._find_device_problem.__wrapped__(GPU) == "AMD's GPUs need Triton 3.5"


def test_an_a100_is_new_enough_and_a_t4_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {(8, 0): None, (7, 5): "the GPU is older than compute capability 8.0"}
    for capability, problem in problems.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert backend._find_device_problem.__wrapped__(GPU) == problem


def test_each_of_nvidias_gpus_has_its_own_chip_if_of_a_capability_of_amds_too(
    on_chip: OnChip, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_chip("gfx942")
    monkeypatch.setattr(torch.version, "hip", None)
    capabilities = {GPU: (9, 4), torch.device("cuda", 1): (8, 6)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.get)
    assert [chip_of(gpu) for gpu in capabilities] == ["sm_94", "sm_86"]
    assert (amd_chip(GPU), warp_size(GPU)) == (None, 32)
    assert amd_chip(torch.device("cpu")) is None


@pytest.mark.parametrize(("chip", "warps"), [("sm_90", 32), ("gfx942", 16)])
def test_cross_entropy_takes_as_many_threads_as_a_block_may_have(chip: str, warps: int) -> None:
    logits, labels = torch.empty(4, 50_304, device="meta"), torch.empty(4, device="meta")
    with choosing_for(chip), recording() as launches:
        cross_entropy_(logits, labels.long(), False, backend="triton")
    assert [launch.config.warps for launch in launches] == [warps]


def test_runs_record_amds_chip_and_rocm(on_chip: OnChip, monkeypatch: pytest.MonkeyPatch) -> None:
    on_chip("gfx942")
    gpu = SimpleNamespace(
        **{"gcnArchName": "gfx942:xnack-", "name": "AMD Instinct MI300X", "major": 9, "minor": 4},
        **{"multi_processor_count": 304, "total_memory": 192 * 10**9, "L2_cache_size": 2**22},
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 22, 3))
    cuda = run_environment._cuda()
    assert (cuda["version"], cuda["rocm"], cuda["nccl"]) == (None, "7.0", "2.22.3")
    assert (cuda["devices"], cuda["memory_gb"]) == (["AMD Instinct MI300X"], [192.0])
