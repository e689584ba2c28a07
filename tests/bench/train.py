"""`python -m tests.bench train`: a training step of M7C with NSA, an index and dense attention.

Weights and activations are bf16, the optimizer's weights float32: gradients are cast to float32,
clipped and given to fused AdamW, and the weights are cast back. No DeepSpeed, no data, one device.
Times are wall times of a step in a loop of --seconds, as in training, where a slow host shows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nsa.gpus import peak_flops
from nsa.model import AttentionConfig, LanguageModel, ModelConfig, flops_per_token
from nsa.model.block import compile_blocks
from nsa.model.config import ACTIVATION_CHECKPOINTING, INDEXED
from tests.bench.harness import (
    Report,
    Result,
    Step,
    add_gpu_flags,
    cell,
    nvidia_smi,
    peak_bytes,
    print_table,
    ratio,
    synchronize,
    words_of,
)

KINDS = {
    "nsa": AttentionConfig(),  # three branches
    "dense": AttentionConfig(kind="dense"),
    "index": AttentionConfig(branches="sel", compressor="pool", selector_loss=1.0, spec=INDEXED),
}
FIGURES = ("loop_ms", "steps", "peak_bytes", "tokens_per_s", "mfu")
WARM_UP = 3  # steps: the first compiles
IN_A_ROW = 4  # steps, after which the host waits for the device


class Stepper:
    """Training steps of a model, its float32 weights and its optimizer."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, compiled: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(config).to(device=device, dtype=dtype)
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        if compiled:
            compile_blocks(self.model)

    def step(self, ids: Tensor, labels: Tensor) -> None:
        """Run forward, backward and the optimizer."""
        self.model(ids, labels=labels).backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def held(self) -> list[Tensor]:
        """Return the tensors that stay on the device between steps."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        return [*self.weights, *self.masters, *(x for x in states if isinstance(x, Tensor))]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser, "2k,8k,32k")
    about = f"attention, in the order of measuring: {', '.join(KINDS)} (%(default)s)"
    add = parser.add_argument
    add("--kinds", type=words_of(*KINDS), default="nsa,dense", help=about)
    add("--checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none", help="(%(default)s)")
    add("--compile", action="store_true", help="compile blocks, as train.compile does")


def run(report: Report) -> None:
    """Measure every length within the time limit; print a table per length."""
    flags = report.flags
    for seq_len in flags.lengths:
        if flags.compile:
            torch.compiler.reset()  # each length is compiled separately
        report.attempt(f"T={seq_len}", partial(_case, seq_len, report))


def _case(seq_len: int, report: Report) -> None:
    flags, device = report.flags, report.device
    chip = report.data["environment"]["hardware"].get("name", "")
    peak = peak_flops(chip, report.dtype_name)  # None if unknown
    ids, labels = random_batch(flags.vocab, flags.tokens, seq_len, device)
    configs = {kind: model_config(report, kind) for kind in flags.kinds}

    def measure(kind: str, stepper: Stepper, result: Result) -> None:
        step = partial(stepper.step, ids, labels)
        result |= loop(step, device, flags.seconds)
        result["tokens_per_s"] = ids.numel() / result["loop_ms"] * 1e3
        flops = flops_per_token(configs[kind], seq_len)
        result["mfu"] = ratio(result["tokens_per_s"] * flops, peak)
        result["peak_bytes"] = peak_bytes(step, stepper.held(), device)

    steppers = {
        kind: partial(Stepper, config, device, report.dtype, flags.compile)
        for kind, config in configs.items()
    }
    results = report.each(steppers, FIGURES, measure)
    over = {
        f"{kind}_over_dense": {
            what: ratio(result[what], results["dense"][what])
            for what in ("tokens_per_s", "peak_bytes")
        }
        for kind, result in results.items()
        if "dense" in results and kind != "dense"
    }
    row = {"length": seq_len, "batch": len(ids), "layers": flags.layers, "vocab_size": flags.vocab}
    row["checkpointing"] = flags.checkpointing
    report.add(row | {"implementations": results} | over)
    lines = [[f"T={seq_len} batch {len(ids)}", "ms", "tokens/s", "MFU", "peak GB", "over dense"]]
    for kind, result in results.items():
        rate, mfu = cell(result["tokens_per_s"], ",.0f"), cell(result["mfu"], ".1%")
        memory = cell(ratio(result["peak_bytes"], 1e9))
        gain = over.get(f"{kind}_over_dense", {}).get("tokens_per_s")
        lines.append([kind, cell(result["loop_ms"]), rate, mfu, memory, cell(gain)])
    print_table(lines, results)


def model_config(report: Report, kind: str) -> ModelConfig:
    """Return M7C with the flags' size, attention and activation checkpointing."""
    flags = report.flags
    return ModelConfig(
        layers=flags.layers,
        vocab_size=flags.vocab,
        attention=replace(KINDS[kind], backend=report.backend),
        activation_checkpointing=getattr(flags, "checkpointing", "none"),
    )


def random_batch(
    vocab: int, tokens: int, seq_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random input_ids and labels [B, T] of about `tokens` tokens."""
    batch = max(1, tokens // seq_len)
    ids = torch.randint(vocab, (batch, seq_len + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loop(step: Step, device: torch.device, seconds: float) -> Result:
    """Return a step's wall milliseconds in a loop of `seconds`, and the clocks during others."""
    for _ in range(WARM_UP):
        step()
    synchronize(device)
    steps, start = 0, time.perf_counter()
    while not steps or time.perf_counter() - start < seconds:
        for _ in range(IN_A_ROW):
            step()
        synchronize(device)
        steps += IN_A_ROW
    result: Result = {"loop_ms": (time.perf_counter() - start) * 1e3 / steps, "steps": steps}
    if device.type == "cuda":
        for _ in range(IN_A_ROW):  # the host is ahead of the device, which is still busy
            step()
        result["nvidia_smi"] = nvidia_smi()
    return result
