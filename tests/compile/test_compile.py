"""The compile check passes kernels within every limit of a chip and fails the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NVIDIA = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
CHIPS = [*NVIDIA, "gfx942", "gfx950"]


def run(*arguments: str | Path, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with its own compile cache."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, "TRITON_CACHE_DIR": str(cache), **env},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the results, and of the kernels that they compiled."""
    return tmp_path_factory.mktemp("check")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    process = run("-m", "tests.compile.toy_check", folder / "results.json", cache=folder / "cache")
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "results.json").read_text())


def test_a_kernel_within_every_limit_passes_on_every_chip(results: dict[str, Any]) -> None:
    assert results["good"]["failures"] == []
    assert [row["chip"] for row in results["good"]["rows"]] == CHIPS
    for row in results["good"]["rows"]:
        assert row["products"] == 2
        assert row["tensor_core"] > 0
        assert row["registers"] > 32
        assert row["shared"] >= 64 * 64 * 2
        assert row["blocks_per_sm"] >= 2


def test_equal_launches_are_compiled_once(results: dict[str, Any]) -> None:
    assert len(results["good"]["rows"]) == len(CHIPS)  # of two equal launches


def test_a_sample_compiles_for_amd(results: dict[str, Any]) -> None:
    assert results["sample"]["failures"] == []
    rows = results["sample"]["rows"]
    assert {row["chip"] for row in rows} == {"gfx942"}
    assert len({row["kernel"] for row in rows}) > 3
    assert all(row["tensor_core"] for row in rows if row["products"])


def test_more_threads_than_a_block_may_have_are_a_failure(results: dict[str, Any]) -> None:
    """32 warps are 1,024 threads of NVIDIA's chips and 2,048 of AMD's."""
    nvidia, amd = (row["failures"] for row in results["many warps"]["rows"])
    assert (nvidia, amd) == ([], ["2,048 threads a block, limit 1,024"])


def test_float32_in_three_passes_counts_as_tensor_cores(results: dict[str, Any]) -> None:
    assert results["in three passes"]["failures"] == []


def test_a_kernel_for_one_position_may_lack_products(results: dict[str, Any]) -> None:
    assert results["no key"]["failures"] == []
    assert [row["chip"] for row in results["no key"]["rows"]] == ["sm_80", "sm_100"]
    for row in results["no key"]["rows"]:
        assert (row["products"], row["tensor_core"]) == (2, 0)


def test_products_without_tensor_cores_are_a_failure(results: dict[str, Any]) -> None:
    for row in results["without tensor cores"]["rows"]:
        assert "matrix products, and no tensor-core instruction" in row["failures"]


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("deep", ["16/128/4/4", "bytes of shared memory a block, limit 166,912"]),
        ("crowded", ["64/64/1/1", "bytes spilled a thread, limit"]),
        ("without tensor cores", ["16/32/4/1", "matrix products without tensor cores, limit 0"]),
        ("not a power of two", ["64/48/4/1", "does not compile", "power of 2"]),
    ],
)
def test_a_failure_names_kernel_case_config_chip_figure_and_limit(
    results: dict[str, Any], kernel: str, named: list[str]
) -> None:
    failure = results[kernel]["failures"][0]
    for part in ["attend", "toy 1/1 heads 64 bf16 T=1000", "sm_80", *named]:
        assert part in failure


def test_products_that_the_assembler_serialises_are_a_failure(results: dict[str, Any]) -> None:
    """By ptxas' warning C7510, of which Triton shows nothing; only Hopper's are asynchronous."""
    ampere, hopper = results["serialised"]["rows"]
    assert ampere["failures"] == []
    assert hopper["failures"] == ["1 warnings of serialised products, limit 0"]


def test_a_kernel_that_does_not_compile_leaves_the_others_checked(results: dict[str, Any]) -> None:
    rows = results["not a power of two"]["rows"]
    assert [bool(row["failures"]) for row in rows] == [True, False]


def test_meta_tensors_compile_what_real_tensors_compile(
    results: dict[str, Any],
) -> None:
    assert results["signatures"]["check"] == results["signatures"]["launch"]
    assert "tt.divisibility" in results["signatures"]["check"][2]


def test_a_launch_finds_the_checks_binaries_in_tritons_cache(results: dict[str, Any]) -> None:
    assert results["found in the cache"] == [True, False]


def test_every_kernel_compiles_within_the_limits_of_an_a100(results: dict[str, Any]) -> None:
    assert results["real"]["failures"] == []
    kernels = sorted(row["kernel"] for row in results["real"]["rows"])
    assert kernels == results["kernels"]["library"]
    assert all(row["tensor_core"] for row in results["real"]["rows"] if row["products"])


@pytest.mark.full
def test_every_operation_compiles_within_the_limits_of_every_chip(tmp_path: Path) -> None:
    out = tmp_path / "aot.json"
    process = run("-m", "tests.bench", "aot", "--jobs=2", "--out", out, cache=tmp_path / "cache")
    assert process.returncode == 0, process.stdout
    rows = json.loads(out.read_text())["rows"]
    assert {row["chip"] for row in rows} == {*NVIDIA, "gfx942"}
    assert {row["operation"] for row in rows} >= {"window_attention", "decode_attention"}
    for row in rows:
        assert not row["products"] or row["tensor_core"]
        if row["chip"] in ("sm_90", "sm_100") and row["operation"] != "decode_attention":
            assert row["asynchronous"] == row["tensor_core"]


def test_every_kernel_of_the_library_is_compiled(results: dict[str, Any]) -> None:
    assert results["kernels"]["check"] == results["kernels"]["library"]
    assert len(results["kernels"]["check"]) > 5


def test_an_unknown_chip_or_operation_is_refused(
    results: dict[str, Any],
) -> None:
    chip, operation = results["refusals"]
    assert f"--arch: 'sm_85': choose from {', '.join(CHIPS)}" in chip
    assert "--operation: 'attend': choose from compressed_attention, " in operation


def test_the_command_fails_if_a_kernel_does(results: dict[str, Any]) -> None:
    assert results["exit code"] == 1


def test_the_command_compiles_what_its_flags_name(folder: Path, results: dict[str, Any]) -> None:
    """Also if Triton's interpreter is enabled, which compiles nothing."""
    out = folder / "aot.json"
    command = "-m tests.bench aot --jobs 1 --arch sm_80 --operation select_blocks --json"
    process = run(*command.split(), "--out", out, cache=folder / "cache", TRITON_INTERPRET="1")
    assert process.returncode == 0, process.stderr
    printed, written = json.loads(process.stdout), json.loads(out.read_text())
    for result in (printed, written):
        assert result["failures"] == []
        assert result["triton"]
        assert len(result["rows"]) == 8  # two shapes, packed or not, with or without an lse
        assert {row["operation"] for row in result["rows"]} == {"select_blocks"}
        assert {row["dtype"] for row in result["rows"]} == {"bf16"}


def test_another_number_of_documents_recompiles_nothing(results: dict[str, Any]) -> None:
    """It would stall a run, each rank at another step."""
    assert results["recompiled"] == []


def test_a_repeated_launch_runs_the_binary_that_triton_would_choose(
    results: dict[str, Any],
) -> None:
    """For every kind of argument: dtypes, alignment, integers that Triton compiles for, None."""
    runs = results["relaunched"]
    assert runs["by launch"] == runs["by triton"]
    assert len({binary for binary, *_ in runs["by launch"]}) > 15
    assert runs["looked up"] <= len(runs["by launch"]) / 2  # the second time without Triton
