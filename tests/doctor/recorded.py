"""Recorded output of nvidia-smi on machines with GPUs."""

# Two A100 PCIe boards under one host bridge; heading underlined, as on a terminal.
TOPO_PHB = """\
\t\x1b[4mGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tPHB\t0-31\t0\t\tN/A
GPU1\tPHB\t X \t0-31\t0\t\tN/A

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
"""

# Four boards, two per CPU, and a network card.
TOPO_SYS = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPIX\tSYS\tSYS\tNODE\t0-31,64-95\t0\t\tN/A
GPU1\tPIX\t X \tSYS\tSYS\tNODE\t0-31,64-95\t0\t\tN/A
GPU2\tSYS\tSYS\t X \tPIX\tSYS\t32-63,96-127\t1\t\tN/A
GPU3\tSYS\tSYS\tPIX\t X \tSYS\t32-63,96-127\t1\t\tN/A
NIC0\tNODE\tNODE\tSYS\tSYS\t X

NIC Legend:

  NIC0: mlx5_0
"""

TOPO_NVLINK = """\
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV12\t0-63\t0\t\tN/A
GPU1\tNV12\t X \t0-63\t0\t\tN/A
"""
