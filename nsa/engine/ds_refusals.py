"""DeepSpeed keys that a run's JSON may not set, or that have no effect in its ZeRO setting.

DeepSpeed's models define which keys exist, not in which setting each is read. The entries below
come from the source of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class ZeroMode:
    """Settings that determine DeepSpeed's optimizer class, and so which keys it reads."""

    stage: int
    precision: str  # "bf16", "fp16" or "fp32"
    accumulation: str  # dtype of accumulated gradients
    overlap: bool = False  # reduction during the backward pass
    static_scale: bool = False  # fp16 with a fixed loss scale
    devices: frozenset[str] = frozenset()  # offload targets of optimizer and parameters
    muon: bool = False  # for matrices, instead of AdamW

    @property
    def bf16_optimizer(self) -> bool:
        """Whether BF16_Optimizer runs: stage 1, bf16 weights, fp32 accumulation."""
        mode = (self.stage, self.precision, self.accumulation)
        return mode == (1, "bf16", "fp32") and "cpu" not in self.devices

    @property
    def buckets(self) -> bool:
        """Whether gradients are reduced in buckets of `reduce_bucket_size` elements."""
        return self.stage > 0 and not self.bf16_optimizer

    @property
    def stage_1_or_2(self) -> bool:
        """Whether the shared optimizer of stages 1 and 2 runs."""
        return self.stage in (1, 2) and self.buckets

    # Measured with DeepSpeed 0.19.8 on two ranks.
    @property
    def tolerates_twice(self) -> bool:
        """Whether a gradient may arrive twice: not if buckets are reduced before the pass ends."""
        return not self.buckets or (self.stage == 1 and not self.overlap)

    @property
    def tolerates_missing(self) -> bool:
        """Whether a gradient may be missing on a rank: stage 0 fills in zeros.

        Elsewhere ranks reduce different tensors, and BF16_Optimizer computes different norms: ranks
        clip differently and may disagree about skipping a step.
        """
        return self.stage == 0


@dataclass(frozen=True)
class Refusal:
    """Keys to refuse, with the reason, the fix and the condition."""

    keys: str  # dotted patterns, separated by spaces
    why: str
    fix: str = ""  # appended to "remove it"
    when: Callable[[ZeroMode], bool] = lambda mode: True

    def applies(self, path: str, mode: ZeroMode) -> bool:
        return self.when(mode) and any(fnmatchcase(path, key) for key in self.keys.split())


def _zero(names: str) -> str:
    return " ".join(f"zero_optimization.{name}" for name in names.split())


BUCKET_KEYS = _zero(
    "reduce_bucket_size overlap_comm contiguous_gradients reduce_scatter parameter_alignment "
    "use_multi_rank_bucket_allreduce round_robin_gradients"
)
STAGE_3_KEYS = _zero(
    "stage3_* zero_* sub_group_size offload_param memory_efficient_linear leaf_module "
    "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
    "enable_sanity_checks"
)
UNUSED_PARTS = (
    "autotuning compile expert_parallel hybrid_engine pipeline tensor_parallel "
    "seq_parallel_communication_data_type sequence_parallel_size weight_quantization "
    "use_data_before_expert_parallelism checkpoint.parallel_write"
)

REFUSALS = (
    # Set by the recipe or another part of the run.
    Refusal(
        "scheduler",
        "the recipe sets the learning-rate schedule",
        " and set train.learning_rate, train.min_learning_rate and train.warmup_steps",
    ),
    Refusal("tensorboard", "the recipe sets it", " and set monitor.tensorboard"),
    Refusal(
        "torch_autocast data_types.param_dtype",
        "the recipe sets the precision",
        " and set train.precision",
    ),
    Refusal(
        "managed_gradient_accumulation",
        "the training loop leaves the accumulation boundary to DeepSpeed",
        " and set train.accumulation",
    ),
    Refusal(
        "optimizer.params.max_grad_norm",
        "DeepSpeed only reads gradient_clipping",
        ', write "gradient_clipping": "auto" and set train.clip',
    ),
    Refusal(
        "dataloader_drop_last data_efficiency",
        "batches do not come from DeepSpeed's loader",
        "; data.* configures the loader",
    ),
    # Parts of DeepSpeed that this project does not use.
    Refusal(UNUSED_PARTS, "it configures a part of DeepSpeed that this project does not start"),
    Refusal("checkpoint.writer datastates_ckpt", "only DeepSpeed's default writer is supported"),
    Refusal(
        f"{_zero('zenflow')} fp16.fp16_master_weights_and_grads",
        "it needs DeepSpeed's CPU Adam, a C++ extension that this project does not build",
    ),
    Refusal("optimizer.params.adam_w_mode", "the recipe trains with AdamW"),
    Refusal(
        "optimizer.type",
        "DeepSpeed clips Muon's gradients only in stage 1 with bf16 weights and fp32 accumulation; "
        "elsewhere it clips the update, which shrinks it more than a hundredfold",
        ", or use ds_configs/zero1_muon.json with train.precision=bf16",
        when=lambda mode: mode.muon and not mode.bf16_optimizer,
    ),
    Refusal(
        "optimizer.params.muon_lr optimizer.params.momentum optimizer.params.ns_method",
        "only Muon reads it",
        when=lambda mode: not mode.muon,
    ),
    Refusal(
        "optimizer.params.fused optimizer.params.foreach optimizer.params.amsgrad "
        "optimizer.params.maximize optimizer.params.capturable optimizer.params.differentiable",
        "not read with Muon",
        when=lambda mode: mode.muon,
    ),
    Refusal(_zero("legacy_stage1"), "DeepSpeed removed the old stage 1 and refuses to start"),
    Refusal(
        _zero("elastic_checkpoint"),
        "it is the old way to change the number of ranks",
        "; --resume --universal does that",
    ),
    Refusal(
        "checkpoint.load_universal",
        "each load sets it from the checkpoint",
        "; use --resume --universal",
    ),
    Refusal(_zero("compute_grad_norm"), "the run logs grad_norm, so it is always computed"),
    # No effect in any setting.
    Refusal(
        f"disable_allgather {_zero('allgather_partitions')}",
        "no effect: DeepSpeed parses it and never reads it",
    ),
    Refusal(
        _zero("allgather_bucket_size"),
        "no effect: each parameter group is gathered in one collective, whatever its size",
    ),
    Refusal("vocabulary_size", "no effect except a warning"),
    Refusal(
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        "no effect: it only concerns optimizers other than AdamW and Muon",
    ),
    Refusal("optimizer.legacy_fusion", "no effect on torch's optimizers"),
    Refusal(
        _zero("save_muon_momentum_buffer_in_memory"),
        "only read by Muon in stage 3, which is refused",
    ),
    # No effect in some settings.
    Refusal(STAGE_3_KEYS, "no effect below stage 3", when=lambda mode: mode.stage < 3),
    Refusal(
        f"{BUCKET_KEYS} {_zero('offload_optimizer load_from_fp32_weights')}",
        "no effect in stage 0, which all-reduces every gradient after the backward pass",
        when=lambda mode: mode.stage == 0,
    ),
    Refusal(
        BUCKET_KEYS,
        "no effect in stage 1 with bf16 weights and fp32 accumulation: DeepSpeed's BF16_Optimizer "
        "all-reduces every gradient once, after the last micro-batch",
        ', or set data_types.grad_accum_dtype to "bf16"',
        when=lambda mode: mode.bf16_optimizer,
    ),
    Refusal(
        _zero("reduce_scatter"),
        "no effect in stages 1 and 2: buckets are always all-reduced",
        when=lambda mode: mode.stage_1_or_2,
    ),
    Refusal(
        _zero("use_multi_rank_bucket_allreduce round_robin_gradients parameter_alignment"),
        "no effect in stage 3",
        when=lambda mode: mode.stage == 3,
    ),
    Refusal(
        _zero("ignore_unused_parameters"),
        "only read in stages 1 and 2 with the optimizer offloaded to the CPU",
        when=lambda mode: not (mode.stage_1_or_2 and "cpu" in mode.devices),
    ),
    Refusal(
        "prescale_gradients gradient_predivide_factor",
        "no effect in stage 1, and DeepSpeed refuses it in stages 2 and 3: buckets are divided by "
        "the number of ranks before they are reduced",
        when=lambda mode: mode.buckets,
    ),
    Refusal(
        "bf16.*",
        "only read with bf16 weights",
        ", or set train.precision=bf16",
        when=lambda mode: mode.precision != "bf16",
    ),
    Refusal(
        "bf16.check_grad_overflow",
        "only read in stage 2 and in stage 1 with bf16 accumulation; elsewhere DeepSpeed always "
        "skips a step with non-finite gradients",
        when=lambda mode: not mode.stage_1_or_2,
    ),
    Refusal(
        "bf16.immediate_grad_update",
        "only read in stage 1 with fp32 accumulation",
        when=lambda mode: not mode.bf16_optimizer,
    ),
    Refusal(
        "bf16.bf16_*",
        "no effect: master weights and optimizer state stay fp32 in stage 0 and in stage 1 with "
        "fp32 accumulation",
        when=lambda mode: not mode.buckets,
    ),
    Refusal(
        "fp16.*",
        "only read with fp16 weights",
        ", or set train.precision=fp16",
        when=lambda mode: mode.precision != "fp16",
    ),
    Refusal(
        "fp16.initial_* fp16.*hysteresis fp16.loss_scale_window fp16.min_loss_scale",
        "no effect with a fixed loss scale",
        ", or remove fp16.loss_scale for a dynamic scale",
        when=lambda mode: mode.static_scale,
    ),
    Refusal(
        "fp16.*hysteresis",
        "no effect in stage 0, which halves the loss scale at once",
        when=lambda mode: mode.stage == 0,
    ),
    Refusal(
        "aio",
        "only read with something offloaded to NVMe",
        when=lambda mode: "nvme" not in mode.devices,
    ),
)
