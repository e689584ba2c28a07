"""The place of the fused kernels. There are none yet, and `auto` says so when it passes by."""

from __future__ import annotations

WHY_NOT = "the triton backend has no kernels yet"
