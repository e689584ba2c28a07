"""Planner inputs: model, batch of one rank, and ZeRO settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class Model:
    """A model's configuration, and the sizes that follow from it."""

    config: ModelConfig
    weight_bytes: int = 2  # 2: bf16 or fp16; 4: fp32
    teacher: ModelConfig | None = None  # frozen, on every GPU, without optimizer state
    dense_steps: int = 0  # first steps, in which sparse attention reads all keys

    @cached_property
    def sizes(self) -> list[int]:
        from nsa.model.count import parameter_sizes

        return parameter_sizes(self.config)

    @cached_property
    def parameters(self) -> int:
        return sum(self.sizes)

    @cached_property
    def teacher_parameters(self) -> int:
        from nsa.model.count import parameter_count

        return 0 if self.teacher is None else parameter_count(self.teacher)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.config.vocab_size * self.config.width

    @property
    def outside_layers(self) -> int:
        """Parameters of embedding and head, which count once if they are tied."""
        return self.embedding * (1 if self.config.tied_head else 2)

    @property
    def layer(self) -> int:
        """Parameters per layer (the final norm is spread over all)."""
        return (self.parameters - self.outside_layers) // self.config.layers


@dataclass(frozen=True)
class BatchShape:
    """One rank's work per optimizer step."""

    seq_len: int
    micro_batch: int
    accumulation: int
    checkpointing: str

    @property
    def tokens(self) -> int:
        """This rank's tokens per micro-batch."""
        return self.seq_len * self.micro_batch


@dataclass(frozen=True)
class Zero:
    """The ZeRO settings that memory and traffic depend on."""

    stage: int
    reduce_bytes: int = 2  # bytes per gradient element in a reduction
    accumulate_bytes: int = 2  # bytes per accumulated gradient element
    bucket: int = 0  # elements; 0: one collective after the backward pass
    overlap: bool = False  # buckets are reduced during the backward pass
    prefetch: int = 0  # stage 3: prefetched parameters
    persistent: int = 0  # stage 3: parameters that are not sharded
    persistent_tensors: int = 0  # stage 3: tensors that are not sharded
    gathers: int = 1  # stage 3: all-gathers of the weights per micro-batch
    offload: bool = False  # to the CPU or NVMe, which no figure accounts for

    @property
    def bf16_optimizer(self) -> bool:
        """Whether each rank keeps all gradients in fp32 (BF16_Optimizer)."""
        return self.stage == 1 and self.accumulate_bytes == 4 and self.bucket == 0
