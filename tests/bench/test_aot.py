"""The compile gate passes what a GPU could run well, and fails what it could not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, with an empty compile cache."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**kept, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gate")
    process = run("-m", "tests.bench.toy_gate", folder / "found.json", cache=folder / "cache")
    assert process.returncode == 0, process.stderr
    return json.loads((folder / "found.json").read_text())


def test_a_kernel_within_every_limit_passes_on_every_chip(found: dict[str, Any]) -> None:
    assert found["good"]["failures"] == []
    assert [row["chip"] for row in found["good"]["rows"]] == ["sm_80", "sm_90", "sm_100"]
    for row in found["good"]["rows"]:
        assert row["products"] == 2
        assert row["tensor_core"] > 0
        assert row["registers"] > 32
        assert row["shared"] >= 64 * 64 * 2
        assert row["blocks_per_sm"] >= 2


def test_equal_launches_are_compiled_once(found: dict[str, Any]) -> None:
    assert len(found["good"]["rows"]) == 3  # of two equal launches, on three chips


def test_float32_in_three_passes_counts_as_tensor_cores(found: dict[str, Any]) -> None:
    assert found["in three passes"]["failures"] == []


def test_a_kernel_whose_query_sees_no_key_has_nothing_to_multiply(found: dict[str, Any]) -> None:
    assert found["no key"]["failures"] == []
    assert [row["chip"] for row in found["no key"]["rows"]] == ["sm_80", "sm_90", "sm_100"]
    for row in found["no key"]["rows"]:
        assert (row["products"], row["tensor_core"], row["multiplies"]) == (2, 0, False)


@pytest.mark.parametrize("kernel", ["without tensor cores", "unknown instructions"])
def test_products_that_are_there_without_tensor_cores_are_a_failure(
    found: dict[str, Any], kernel: str
) -> None:
    for row in found[kernel]["rows"]:
        assert "matrix products, and no tensor-core instruction" in row["wrong"]


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        ("deep", ["64/128/4/4", "bytes of shared memory a block, limit 166,912"]),
        ("crowded", ["64/64/1/1", "bytes spilled a thread, limit"]),
        ("without tensor cores", ["64/32/4/1", "matrix products without tensor cores, limit 0"]),
        ("not a power of two", ["64/48/4/1", "does not compile", "power of 2"]),
    ],
)
def test_a_failure_names_kernel_case_config_chip_figure_and_limit(
    found: dict[str, Any], kernel: str, named: list[str]
) -> None:
    failure = found[kernel]["failures"][0]
    for part in ["attend", "toy 1/1 heads 64 bf16 T=1000", "sm_80", *named]:
        assert part in failure


def test_an_operand_that_the_assembler_overwrites_while_it_is_read_is_a_failure(
    found: dict[str, Any],
) -> None:
    if found["assembler"] >= [13, 3]:
        pytest.skip("this ptxas overwrites none")
    ampere, hopper = found["overwritten"]["rows"]
    assert ampere["wrong"] == []
    assert len(hopper["wrong"]) == 1
    assert "products whose operand is overwritten while they run, limit 0" in hopper["wrong"][0]


def test_one_kernel_that_does_not_compile_leaves_the_others_checked(found: dict[str, Any]) -> None:
    rows = found["not a power of two"]["rows"]
    assert [bool(row["wrong"]) for row in rows] == [True, False]


def test_what_is_compiled_for_meta_tensors_is_what_a_real_launch_compiles(
    found: dict[str, Any],
) -> None:
    assert found["signatures"]["gate"] == found["signatures"]["launch"]
    assert "tt.divisibility" in found["signatures"]["gate"][2]


def test_a_launch_finds_in_tritons_cache_what_the_gate_has_compiled(found: dict[str, Any]) -> None:
    assert found["found in the cache"] == [True, False]


def test_the_models_own_shape_compiles_within_the_limits_of_an_a100(found: dict[str, Any]) -> None:
    assert found["real"]["failures"] == []
    assert {row["operation"] for row in found["real"]["rows"]} >= {"window_attention"}
    assert all(row["tensor_core"] for row in found["real"]["rows"] if row["products"])


def test_every_kernel_of_the_library_is_compiled(found: dict[str, Any]) -> None:
    assert found["kernels"]["gate"] == found["kernels"]["library"]
    assert len(found["kernels"]["gate"]) > 5


def test_an_unknown_chip_or_operation_is_refused_with_those_there_are(
    found: dict[str, Any],
) -> None:
    chip, operation = found["refusals"]
    assert chip == "--arch sm_85: choose from sm_80, sm_90, sm_100"
    assert operation.startswith("--operation attend: choose from compressed_attention, ")


def test_the_command_fails_where_a_kernel_does(found: dict[str, Any]) -> None:
    assert found["exit code"] == 1


def test_the_command_compiles_even_where_the_interpreter_is_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "aot.json"
    command = "-m nsa.bench aot --arch sm_80 --jobs 1 --operation select_blocks --out"
    process = run(*command.split(), out, cache=tmp_path / "cache", TRITON_INTERPRET="1")
    assert process.returncode == 0, process.stderr
    written = json.loads(out.read_text())
    assert written["failures"] == []
    assert written["triton"]
    assert {row["kernel"] for row in written["rows"]} == {"select_kernel"}
    assert all(row["kernel"] in process.stdout for row in written["rows"])


def test_another_number_of_documents_compiles_nothing_anew(found: dict[str, Any]) -> None:
    """A run would stand still in the middle for it, each rank at another step."""
    assert found["compiled anew"] == []
