"""`python -m tests.bench train`: a training step of M7C, NSA and dense attention alternating.

Weights and activations are bf16, the optimizer's weights float32: gradients are cast to float32,
clipped and given to fused AdamW, and the weights are cast back. No DeepSpeed, no data, one device.

`loop_ms` is the wall time of a step in a loop, as in training, where a slow host shows. Tokens/s
and MFU are those of the loop.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from torch import Tensor

from nsa.gpus import peak_flops
from nsa.model import AttentionConfig, LanguageModel, ModelConfig, flops_per_token
from nsa.model.block import compile_blocks
from nsa.model.config import ACTIVATION_CHECKPOINTING, ATTENTION_KINDS
from tests.bench.harness import (
    Report,
    Result,
    Step,
    add_gpu_flags,
    cell,
    figure,
    peak_bytes,
    print_table,
    ratio,
    synchronize,
    words_of,
)

TIMES = ("step_ms", "loop_ms")
FIGURES = (*TIMES, "peak_bytes", "tokens_per_s", "mfu")
LOOP = 4  # steps in a row, after which the host waits for the device


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
    about = "attention, in the order of measuring (%(default)s)"
    add, kinds = parser.add_argument, ATTENTION_KINDS
    add("--kinds", type=words_of(*kinds), default=",".join(kinds), help=about)
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
    ids, labels = random_batch(flags, seq_len, device)
    batch = len(ids)
    configs = {kind: model_config(report, kind) for kind in flags.kinds}
    builders = {
        kind: partial(Stepper, config, device, report.dtype, flags.compile)
        for kind, config in configs.items()
    }
    steppers, results = report.build(builders, FIGURES)
    steps = {kind: partial(x.step, ids, labels) for kind, x in steppers.items()}
    report.time(steps, results, "step_ms")
    for kind, result in results.items():
        if result["step_ms"]:
            result["peak_bytes"] = peak_bytes(steps[kind], steppers[kind].held(), device)
            result["loop_ms"] = _loop_ms(steps[kind], device)
            result["tokens_per_s"] = batch * seq_len / result["loop_ms"] * 1e3
            flops = flops_per_token(configs[kind], seq_len)
            result["mfu"] = ratio(result["tokens_per_s"] * flops, peak)
    over = {}
    if set(ATTENTION_KINDS) <= results.keys():
        over = {
            what: ratio(results["nsa"][what], results["dense"][what])
            for what in ("tokens_per_s", "peak_bytes")
        }
    row = {
        "length": seq_len,
        "batch": batch,
        "layers": flags.layers,
        "vocab_size": flags.vocab,
        "checkpointing": flags.checkpointing,
        "implementations": results,
        "nsa_over_dense": over,
    }
    report.add(row)
    _print(f"T={seq_len} batch {batch}", results, over)


def model_config(report: Report, kind: str) -> ModelConfig:
    """Return M7C with the flags' size, attention and activation checkpointing."""
    flags = report.flags
    return ModelConfig(
        layers=flags.layers,
        vocab_size=flags.vocab,
        attention=AttentionConfig(kind=kind, backend=report.backend),
        activation_checkpointing=getattr(flags, "checkpointing", "none"),
    )


def random_batch(
    flags: argparse.Namespace, seq_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random input_ids and labels [B, T] of about --tokens tokens."""
    batch = max(1, flags.tokens // seq_len)
    tokens = torch.randint(flags.vocab, (batch, seq_len + 1), device=device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _loop_ms(step: Step, device: torch.device) -> float:
    """Return a step's wall milliseconds, the mean of LOOP steps in a row."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(LOOP):
        step()
    synchronize(device)
    return (time.perf_counter() - start) * 1e3 / LOOP


def _print(title: str, results: dict[str, Result], over: dict[str, float | None]) -> None:
    lines = [[title, "step ms", "in a loop", "tokens/s", "MFU", "peak GB"]]
    for kind, result in results.items():
        times = (cell(figure(result, what)) for what in TIMES)
        rate, mfu = cell(result["tokens_per_s"], ",.0f"), cell(result["mfu"], ".1%")
        lines.append([kind, *times, rate, mfu, cell(ratio(result["peak_bytes"], 1e9))])
    print_table(lines, results)
    if over:
        print("NSA's tokens/s over dense:", cell(over["tokens_per_s"]), "\n", flush=True)
