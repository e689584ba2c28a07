"""`python -m nsa.bench train`: a training step of M7C, with NSA and with dense attention, in turns.

Weights and activations are bf16, the optimizer's weights float32: gradients are widened, clipped,
given to fused AdamW, and the weights are written back narrow. No DeepSpeed, no data, one device.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa.bench import goals
from nsa.bench.gpu import Step, peak_bytes, recover, take_turns
from nsa.bench.report import Report, ratio, shown, table
from nsa.model import AttentionConfig, LanguageModel, ModelConfig, flops_per_token
from nsa.monitor.throughput import peak_flops

KINDS = ("nsa", "dense")


class Trainer:
    """A model, its float32 weights and its optimizer."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        self.config = config
        self.model = LanguageModel(config).to(device=device, dtype=dtype)
        self.weights = list(self.model.parameters())
        self.masters = [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.loss = torch.compile(self.model) if compiled else self.model

    def gradients(self, ids: Tensor, labels: Tensor) -> None:
        """Forward and backward; gradients of an earlier call are dropped."""
        for weight in self.weights:
            weight.grad = None
        self.loss(ids, labels=labels).backward()

    def step(self, ids: Tensor, labels: Tensor) -> None:
        """All of a training step."""
        self.gradients(ids, labels)
        for weight, master in zip(self.weights, self.masters, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.optimizer.step()
        for master in self.masters:
            master.grad = None
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)

    def owned(self) -> list[Tensor]:
        """What stays on the device between steps."""
        states = [x for state in self.optimizer.state.values() for x in state.values()]
        return [*self.weights, *self.masters, *(x for x in states if isinstance(x, Tensor))]


def run(flags: argparse.Namespace) -> dict[str, Any]:
    """Measure every length that fits into the time; prints a table a length."""
    report = Report(flags)
    backend = flags.backend or ("triton" if report.device.type == "cuda" else "blockwise")
    report.data["settings"]["backend"] = backend
    for seq_len in flags.lengths:
        if flags.compile:
            torch.compiler.reset()  # each length is compiled for itself
        report.attempt(f"T={seq_len}", partial(_case, seq_len, backend, report))
    rows = report.data["rows"] if report.device.type == "cuda" else []
    return report.finish(goals=goals.of_train(rows))


def _case(seq_len: int, backend: str, report: Report) -> None:
    flags, device = report.flags, report.device
    batch = max(1, flags.tokens // seq_len)
    config = ModelConfig(
        layers=flags.layers,
        vocab_size=flags.vocab,
        activation_checkpointing=flags.activation_checkpointing,
    )
    tokens = torch.randint(config.vocab_size, (batch, seq_len + 1), device=device)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found: dict[str, dict[str, Any]] = {}
    trainers: dict[str, Trainer] = {}
    for kind in KINDS:
        attention = AttentionConfig(kind=kind, backend=backend)
        try:
            twin = replace(config, attention=attention)
            trainers[kind] = Trainer(twin, device, report.dtype, flags.compile)
            found[kind] = {"why_not": {}}
        except Exception as error:  # such as memory that does not suffice
            found[kind] = {"why_not": {"all": recover(error, device)}}
    for what in ("gradients", "step"):
        steps: dict[str, Step] = {
            kind: partial(getattr(trainer, what), ids, labels) for kind, trainer in trainers.items()
        }
        timings, failed = take_turns(steps, device, seconds=flags.seconds, rounds=flags.rounds)
        for kind in KINDS:
            found[kind][f"{what}_ms"] = asdict(timings[kind]) if kind in timings else None
            if kind in failed:
                found[kind]["why_not"][what] = failed[kind]
    for kind, one in found.items():
        taken = one["step_ms"]
        one["peak_bytes"] = None
        if taken is not None:
            one["peak_bytes"] = peak_bytes(steps[kind], trainers[kind].owned(), device)
        seconds = None if taken is None else taken["median"] / 1e3
        one |= _rates(config, kind, seq_len, ratio(batch * seq_len, seconds), report)
    row = {
        "length": seq_len,
        "batch": batch,
        "layers": config.layers,
        "vocab_size": config.vocab_size,
        "contenders": found,
        "nsa_over_dense": {
            what: ratio(found["nsa"][what], found["dense"][what])
            for what in ("tokens_per_s", "peak_bytes")
        },
    }
    report.add(row)
    _show(row)


def _rates(
    config: ModelConfig, kind: str, seq_len: int, rate: float | None, report: Report
) -> dict[str, float | None]:
    """Tokens/s and the share of the chip's peak: of what is executed, and as if it were dense."""
    twin = replace(config, attention=AttentionConfig(kind=kind))
    name = report.data["environment"]["hardware"].get("name", "")
    peak = peak_flops(name, report.dtype_name)

    def share(flops: float) -> float | None:
        return None if rate is None or peak is None else rate * flops / peak

    return {
        "tokens_per_s": rate,
        "mfu": share(flops_per_token(twin, seq_len)),
        "mfu_as_if_dense": share(flops_per_token(twin, seq_len, dense_equivalent=True)),
    }


def _show(row: dict[str, Any]) -> None:
    title = f"T={row['length']} batch {row['batch']}"
    lines = [[title, "fwd+bwd ms", "step ms", "tokens/s", "MFU", "peak GB"]]
    reasons = []
    for kind, one in row["contenders"].items():
        peak = one["peak_bytes"]
        times = [one[what] and one[what]["median"] for what in ("gradients_ms", "step_ms")]
        memory = None if peak is None else peak / 1e9
        cells = [shown(time) for time in times]
        cells += [shown(one["tokens_per_s"], ",.0f"), shown(one["mfu"], ".1%"), shown(memory)]
        lines.append([kind, *cells])
        reasons += [f"  {kind}, {what}: {why}" for what, why in one["why_not"].items()]
    table(lines)
    over = shown(row["nsa_over_dense"]["tokens_per_s"])
    print(*reasons, f"NSA's tokens/s over dense: {over}", "", sep="\n", flush=True)
