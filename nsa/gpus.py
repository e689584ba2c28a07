"""GPUs by name: peak rates and memory from data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """Peak rates of dense matrix products, and memory."""

    bf16: float  # TFLOP/s in bf16 and fp16, summed in fp32
    tf32: float  # TFLOP/s in TF32, the fastest way in which these chips multiply fp32 matrices
    memory: int  # GB


# By the driver's full device name without "NVIDIA": SXM, PCIe and NVL boards of one chip differ.
# MIG slices ("... MIG 3g.40gb"), laptop chips and custom boards are not listed.
# From the makers' data sheets (figures "with sparsity" halved); GeForce from the GA102, Ada and RTX
# Blackwell architecture papers.
GPUS = {
    "A100-SXM4-40GB": GPU(312.0, 156.0, 40),
    "A100-SXM4-80GB": GPU(312.0, 156.0, 80),
    "A100-PCIE-40GB": GPU(312.0, 156.0, 40),
    "A100 80GB PCIe": GPU(312.0, 156.0, 80),
    "H100 80GB HBM3": GPU(989.4, 494.7, 80),  # SXM5
    "H100 PCIe": GPU(756.5, 378.0, 80),
    "H100 NVL": GPU(835.5, 417.5, 94),
    "H200": GPU(989.4, 494.7, 141),  # SXM5
    "H200 NVL": GPU(835.5, 417.5, 141),
    "GH200 120GB": GPU(989.4, 494.7, 96),
    "GH200 480GB": GPU(989.4, 494.7, 96),
    "GH200 144G HBM3e": GPU(989.4, 494.7, 144),
    "B200": GPU(2250.0, 1125.0, 180),
    "GB200": GPU(2500.0, 1250.0, 186),
    "L40S": GPU(362.0, 183.0, 48),
    "L40": GPU(181.0, 90.5, 48),
    "L4": GPU(121.0, 60.0, 24),
    "A10": GPU(125.0, 62.5, 24),
    "A30": GPU(165.0, 82.0, 24),
    "A40": GPU(149.7, 74.8, 48),
    "RTX A6000": GPU(154.8, 77.4, 48),
    "GeForce RTX 3090": GPU(71.0, 35.6, 24),
    "GeForce RTX 4090": GPU(165.2, 82.6, 24),
    "GeForce RTX 5090": GPU(209.5, 104.8, 32),
    "AMD Instinct MI300X": GPU(1307.4, 653.7, 192),
}


def peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak FLOP/s of one device in dense matrix products; None if unknown."""
    gpu = GPUS.get(device_name.removeprefix("NVIDIA ").strip())
    if gpu is None:
        return None
    tflops = gpu.tf32 if precision == "fp32" else gpu.bf16
    return tflops * 1e12
