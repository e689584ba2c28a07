"""`python -m tests.bench train`: a training step of M7C with NSA, an index and dense attention.

Weights and activations are bf16, the optimizer's weights float32: gradients are cast to float32,
clipped and given to fused AdamW, and the weights are cast back. No DeepSpeed, no data, one device.
Times are wall times of a step in a loop of --seconds, as in training, where a slow host shows.
"""

import argparse
import time
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nsa.gpus import peak_flops
from nsa.model import AttentionConfig, LanguageModel, ModelConfig, flops_per_token
from nsa.model.config import ACTIVATION_CHECKPOINTING, INDEXED
from tests.bench.harness import Report, Result, Step, add_gpu_flags, lengths, ratio, words_of

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

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(config).to(device=device, dtype=dtype)
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, ids: Tensor, labels: Tensor) -> None:
        """Run forward, backward and the optimizer."""
        self.model(ids, labels=labels).backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_gpu_flags(parser)
    about = f"attention, in the order of measuring: {', '.join(KINDS)} (%(default)s)"
    add = parser.add_argument
    add("--lengths", type=lengths, default="2k,8k,32k", help="of sequences (%(default)s)")
    add("--layers", type=int, default=12, help="transformer blocks")
    add("--vocab", type=int, default=50_304, help="rows of the embedding")
    add("--kinds", type=words_of(*KINDS), default="nsa,dense", help=about)
    add("--checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none", help="(%(default)s)")


def run(report: Report) -> None:
    """Measure every length within the time limit; print a table per length."""
    flags = report.flags
    for seq_len in flags.lengths:
        report.attempt(f"T={seq_len}", partial(_case, seq_len, report))


def _case(seq_len: int, report: Report) -> None:
    flags, device = report.flags, report.device
    peak = peak_flops(torch.cuda.get_device_name(), "bf16") if report.on_gpu else None
    ids, labels = random_batch(flags.vocab, flags.tokens, seq_len, device)
    configs = {
        kind: ModelConfig(
            layers=flags.layers,
            vocab_size=flags.vocab,
            attention=replace(KINDS[kind], backend=report.backend),
            activation_checkpointing=flags.checkpointing,
        )
        for kind in flags.kinds
    }

    def measure(kind: str, stepper: Stepper, result: Result) -> None:
        step = partial(stepper.step, ids, labels)
        result |= loop(step, device, flags.seconds)
        result["tokens_per_s"] = ids.numel() / result["loop_ms"] * 1e3
        flops = flops_per_token(configs[kind], seq_len)
        result["mfu"] = ratio(result["tokens_per_s"] * flops, peak)
        result["peak_bytes"] = report.peak_bytes(step)

    steppers = {
        kind: partial(Stepper, config, device, report.dtype) for kind, config in configs.items()
    }
    row = {"length": seq_len, "batch": len(ids), "layers": flags.layers, "vocab_size": flags.vocab}
    row["checkpointing"] = flags.checkpointing
    report.compare(row, steppers, FIGURES, measure, base="dense")


def random_batch(
    vocab: int, tokens: int, seq_len: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return random input_ids and labels [B, T] of about `tokens` tokens."""
    batch = max(1, tokens // seq_len)
    ids = torch.randint(vocab, (batch, seq_len + 1), device=device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loop(step: Step, device: torch.device, seconds: float) -> Result:
    """Return a step's wall milliseconds in a loop of `seconds`."""
    synchronize = torch.get_device_module(device).synchronize
    for _ in range(WARM_UP):
        step()
    synchronize()
    steps, start = 0, time.perf_counter()
    while not steps or time.perf_counter() - start < seconds:
        for _ in range(IN_A_ROW):
            step()
        synchronize()
        steps += IN_A_ROW
    return {"loop_ms": (time.perf_counter() - start) * 1e3 / steps, "steps": steps}
