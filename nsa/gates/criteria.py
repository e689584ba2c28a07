"""Criteria of the gates: pure functions of what a run has recorded in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from nsa.constants import BRANCHES
from nsa.gates.result import Criterion
from nsa.monitor.artifacts import Row, Table, number
from nsa.monitor.config import LadderConfig
from nsa.monitor.history import RankHistory

MIN_TIMED_STEPS = 20  # logged steps needed to judge the spread of step times
MIN_STEPS_FOR_GROWTH = 100  # below, caches still fill in the first half
MIN_LOSSES = 4  # logged steps needed to compare the last losses with the first


@dataclass(frozen=True)
class Evidence:
    """What is recorded of a run up to the step of a gate."""

    since: int  # the step of the gate before
    step: int
    log_every: int
    metrics: Table  # rows of metrics.csv
    selection: Table  # the newest rows of selection.csv
    ranks: list[RankHistory]

    @cached_property
    def rows(self) -> list[Row]:
        return [row for row in self.metrics.rows if 1 <= row["step"] <= self.step]

    def recent(self, column: str) -> list[float]:
        """Return the finite values since the gate before, without the first step of each start.

        That step compiles and fills caches; its row has no tokens/s.
        """
        rows = (row for row in self.rows if row["step"] > self.since and "tokens_per_s" in row)
        return [row[column] for row in rows if math.isfinite(row.get(column, math.nan))]

    def source(self, column: str, count: int, since: int = 0) -> str:
        text = f"metrics.csv, {column} of {count:,} rows, steps {since + 1:,} to {self.step:,}"
        return f"{text}; {self.metrics.problem}" if self.metrics.problem else text


def sanity(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """All ranks took the steps, and every loss is finite."""
    return [_steps_recorded(evidence), _slowest_rank(evidence), _loss_finite(evidence)]


def smoke(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """The loss falls, at a steady and plausible speed, with all GPUs busy."""
    return [
        *sanity(evidence, config),
        _loss_falls(evidence, config),
        _longest_pause(evidence, config),
        _step_time_spread(evidence, config),
        _tokens_per_s(evidence, config),
        *_gpu_utilization(evidence, config),
        _skipped_steps(evidence, config),
        _mean_gates(evidence, config),
    ]


def extended(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """As smoke, and peak memory neither grows nor reaches its limit."""
    return [*smoke(evidence, config), _peak_memory(evidence, config), _growth(evidence, config)]


def production(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """As extended, and the validation loss is finite."""
    return [*extended(evidence, config), _validation_loss(evidence)]


CRITERIA: dict[str, Callable[[Evidence, LadderConfig], list[Criterion]]] = {
    "sanity": sanity,
    "smoke": smoke,
    "extended": extended,
    "production": production,
}


def _steps_recorded(evidence: Evidence) -> Criterion:
    """Each step up to the gate must lie in the span of a logged row or of rank 0's heartbeats.

    A row covers the steps since the row that is due before it.
    """
    spans = [(int(row["step"]) - evidence.log_every, int(row["step"])) for row in evidence.rows]
    spans += evidence.ranks[0].done
    gaps = list(_gaps(spans, evidence.step))
    missing = sum(last - first + 1 for first, last in gaps)
    source = f"metrics.csv (rows: {len(evidence.rows):,}) and rank 0's heartbeats"
    if gaps:
        shown = ", ".join(f"{first:,}-{last:,}" for first, last in gaps[:5])
        more = f" and {len(gaps) - 5} more gaps" if len(gaps) > 5 else ""
        source += f"; no record of steps {shown}{more}"
    value = float(evidence.step - missing)
    return Criterion("steps recorded", not gaps, value, f"all {evidence.step:,}", source)


def _gaps(spans: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last of the steps from 1 to `step` that no (from, to] covers."""
    reached = 0
    for start, end in sorted(spans):
        if start > reached:
            yield reached + 1, min(start, step)
        reached = max(reached, end)
    if reached < step:
        yield reached + 1, step


def _slowest_rank(evidence: Evidence) -> Criterion:
    name, limit = "slowest rank's step", f"{evidence.step:,}"
    if not any(history.lines for history in evidence.ranks):
        return _unmeasured(name, limit, "no heartbeats (monitor.heartbeat)")
    slowest = min(evidence.ranks, key=lambda history: history.step)
    source = f"heartbeats of {len(evidence.ranks)} ranks; rank {slowest.rank} is the slowest"
    return Criterion(name, slowest.step >= evidence.step, float(slowest.step), limit, source)


def _losses(evidence: Evidence) -> tuple[list[tuple[float, float]], str]:
    """Return (step, loss) of the logged steps, else of rank 0's heartbeats, and the source."""
    losses = [(row["step"], row["loss"]) for row in evidence.rows if "loss" in row]
    if losses:
        return losses, evidence.source("loss", len(losses))
    losses = [(float(step), loss) for step, loss in evidence.ranks[0].losses]
    problem = evidence.metrics.problem or "metrics.csv has no losses"
    return losses, f"{problem}; {len(losses):,} losses from rank 0's heartbeats"


def _loss_finite(evidence: Evidence) -> Criterion:
    """A skipped step may have a non-finite loss: its gradients never reached the weights."""
    losses, source = _losses(evidence)
    bad = [step for step, loss in losses if not math.isfinite(loss)]
    skipped = _skipped(evidence) or 0
    if bad:
        source += f"; not finite at step {', '.join(f'{step:,.0f}' for step in bad[:5])}"
    if bad and skipped:
        source += f"; {skipped:,} steps were skipped"
    limit = f"at most {skipped}, the skipped steps" if skipped else "none"
    ok = bool(losses) and len(bad) <= skipped
    value = float(len(bad)) if losses else None
    return Criterion("non-finite losses", ok, value, limit, source)


def _loss_falls(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "final / initial loss", "below 1"
    if not config.require_fall:
        return _off(name, "require_fall")
    rows, source = _losses(evidence)
    losses = [loss for _, loss in rows if math.isfinite(loss)]
    if len(losses) < MIN_LOSSES:
        why = f"{len(losses)} finite losses, {MIN_LOSSES} are needed; {source}"
        return _unmeasured(name, limit, why)
    width = max(1, min(20, len(losses) // 5))
    first, last = fmean(losses[:width]), fmean(losses[-width:])
    source += f"; means of the first and last {width}: {first:.4g}, {last:.4g}"
    return Criterion(name, last < first, number(last / first) if first else None, limit, source)


def _longest_pause(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "longest pause, seconds", f"at most {config.max_pause:g}"
    if not config.max_pause:
        return _off(name, "max_pause")
    if all(history.lines for history in evidence.ranks):
        worst = max(evidence.ranks, key=lambda history: history.pause)
        source = f"heartbeats of {len(evidence.ranks)} ranks; {worst.pause_at or 'no pause'}"
        return Criterion(name, worst.pause <= config.max_pause, worst.pause, limit, source)
    means = evidence.recent("seconds")
    if not means:
        return _unmeasured(name, limit, "neither heartbeats of every rank nor rows of metrics.csv")
    # A row holds the mean since the row before, all of which may have been one pause.
    longest, rows = max(means), evidence.log_every
    source = f"no heartbeats; {evidence.source('seconds', len(means), evidence.since)}"
    if longest > config.max_pause:
        return Criterion(name, False, longest, limit, source)
    if longest * rows > config.max_pause:
        return _unmeasured(name, limit, f"{source}: a row is the mean of {rows} steps")
    return Criterion(name, True, longest * rows, limit, source)


def _step_time_spread(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "p90 / median step time", f"at most {config.max_step_spread:g}"
    if not config.max_step_spread:
        return _off(name, "max_step_spread")
    times = sorted(evidence.recent("seconds"))
    if len(times) < MIN_TIMED_STEPS or median(times) <= 0:
        why = f"{len(times)} logged steps were timed after warm-up, {MIN_TIMED_STEPS} are needed"
        return _unmeasured(name, limit, why)
    middle, p90 = median(times), times[math.ceil(0.9 * len(times)) - 1]
    source = evidence.source("seconds", len(times), evidence.since)
    source += f"; median {middle:.3g} s, p90 {p90:.3g} s"
    return Criterion(name, p90 <= config.max_step_spread * middle, p90 / middle, limit, source)


def _tokens_per_s(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "median tokens/s", f"at least {config.min_tokens_per_s:g}"
    if not config.min_tokens_per_s:
        return _off(name, "min_tokens_per_s")
    rates = evidence.recent("tokens_per_s")
    if not rates:
        return _unmeasured(name, limit, "no logged tokens/s since the gate before")
    source = evidence.source("tokens_per_s", len(rates), evidence.since)
    return Criterion(name, median(rates) >= config.min_tokens_per_s, median(rates), limit, source)


def _gpu_utilization(evidence: Evidence, config: LadderConfig) -> Iterator[Criterion]:
    utilization = {history.rank: history.gpu_utilization for history in evidence.ranks}
    means = {rank: mean for rank, mean in utilization.items() if mean is not None}
    shown = ", ".join(f"rank {rank} {mean:.2f}" for rank, mean in list(means.items())[:8])
    source = f"gpu_busy of heartbeats between steps: {shown}"
    if unmeasured := [str(rank) for rank in utilization if rank not in means]:
        source = f"no gpu_busy in the heartbeats of ranks {', '.join(unmeasured)}"
    name, limit = "min GPU utilization", f"at least {config.min_gpu_busy:g}"
    if not config.min_gpu_busy:
        yield _off(name, "min_gpu_busy")
    elif unmeasured:
        yield _unmeasured(name, limit, source)
    else:
        lowest = min(means.values())
        yield Criterion(name, lowest >= config.min_gpu_busy, lowest, limit, source)
    name, limit = "GPU utilization spread", f"at most {config.max_gpu_imbalance:g}"
    if not config.max_gpu_imbalance:
        yield _off(name, "max_gpu_imbalance")
    elif unmeasured:
        yield _unmeasured(name, limit, source)
    else:
        spread = max(means.values()) - min(means.values())
        yield Criterion(name, spread <= config.max_gpu_imbalance, spread, limit, source)


def _skipped_steps(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "skipped-step fraction", f"at most {config.max_skipped:g}"
    if not config.max_skipped:
        return _off(name, "max_skipped")
    skipped = _skipped(evidence)
    if skipped is None:
        return _unmeasured(name, limit, "no heartbeats")
    fraction = skipped / evidence.step
    source = f"heartbeats: {skipped:,} of {evidence.step:,} steps"
    return Criterion(name, fraction <= config.max_skipped, fraction, limit, source)


def _skipped(evidence: Evidence) -> int | None:
    counts = (history.skipped for history in evidence.ranks)
    return max((count for count in counts if count is not None), default=None)


def _mean_gates(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "min mean gate", f"at least {config.min_gate:g}"
    if not config.min_gate:
        return _off(name, "min_gate")
    rows = [row for row in evidence.selection.rows if row["step"] <= evidence.step]
    newest = rows[-1]["step"] if rows else 0
    layers = [row for row in rows if row["step"] == newest > evidence.since]
    means = {
        branch: fmean(row[f"gate_{branch}"] for row in layers)
        for branch in BRANCHES
        if layers and all(f"gate_{branch}" in row for row in layers)
    }
    if not means:
        why = evidence.selection.problem or "no gates were logged since the gate before"
        return _unmeasured(name, limit, f"{why} (dense attention has no gates)")
    shown = ", ".join(f"{branch} {mean:.3f}" for branch, mean in means.items())
    source = f"selection.csv, {len(layers)} layers at step {newest:,.0f}: {shown}"
    lowest = math.nan if any(map(math.isnan, means.values())) else min(means.values())
    return Criterion(name, lowest >= config.min_gate, number(lowest), limit, source)


def _peak_memory(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "peak memory of any rank, GB", f"below {config.max_memory_gb:g}"
    if not config.max_memory_gb:
        return _off(name, "max_memory_gb")
    peaks = {}
    for history in evidence.ranks:
        peak = max([history.snapshot_gb, *(memory for _, memory in _samples(evidence, history))])
        if peak:
            peaks[history.rank] = peak
    if not peaks:
        return _unmeasured(name, limit, "no memory in heartbeats, snapshots or metrics.csv")
    worst = max(peaks, key=lambda rank: peaks[rank])
    source = f"heartbeats, memory/ and metrics.csv of ranks {', '.join(map(str, peaks))}"
    if peaks[worst] < config.max_memory_gb and len(peaks) < len(evidence.ranks):
        return _unmeasured(name, limit, f"{source} only: {peaks[worst]:.3g}")
    source += f"; rank {worst} is the highest"
    return Criterion(name, peaks[worst] < config.max_memory_gb, peaks[worst], limit, source)


def _growth(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "peak-memory growth, second half", f"at most {config.max_memory_growth:g}"
    if not config.max_memory_growth:
        return _off(name, "max_memory_growth")
    if evidence.step < MIN_STEPS_FOR_GROWTH:
        return _unmeasured(
            name, limit, f"{evidence.step:,} steps, {MIN_STEPS_FOR_GROWTH} are needed"
        )
    growth = {}
    for history in evidence.ranks:
        samples = _samples(evidence, history)
        early = max((memory for step, memory in samples if 2 * step <= evidence.step), default=0)
        if early > 0:
            growth[history.rank] = max(memory for _, memory in samples) / early - 1
    if not growth:
        return _unmeasured(name, limit, "no rank recorded its memory in the first half")
    worst = max(growth, key=lambda rank: growth[rank])
    source = f"memory_gb of ranks {', '.join(map(str, growth))}; rank {worst} grew the most"
    ok = growth[worst] <= config.max_memory_growth
    if ok and len(growth) < len(evidence.ranks):
        return _unmeasured(name, limit, f"{source}: {growth[worst]:.1%}; others unknown")
    return Criterion(name, ok, growth[worst], limit, source)


def _samples(evidence: Evidence, history: RankHistory) -> list[tuple[float, float]]:
    """Return (step, GB) from a rank's heartbeats; for rank 0 without any, from metrics.csv."""
    if history.memory or history.rank:
        return [(float(step), memory) for step, memory in history.memory]
    return [(row["step"], row["memory_gb"]) for row in evidence.rows if row.get("memory_gb")]


def _validation_loss(evidence: Evidence) -> Criterion:
    name, limit = "validation loss", "finite"
    losses = [(row["step"], row["val_loss"]) for row in evidence.rows if "val_loss" in row]
    if not losses:
        return _unmeasured(name, limit, "metrics.csv holds no val_loss")
    step, loss = losses[-1]
    source = f"metrics.csv, val_loss of step {step:,.0f}, the last of {len(losses):,}"
    return Criterion(name, math.isfinite(loss), number(loss), limit, source)


def _off(name: str, setting: str) -> Criterion:
    return _unmeasured(name, "", f"switched off by monitor.ladder.{setting}")


def _unmeasured(name: str, limit: str, why: str) -> Criterion:
    return Criterion(name, None, None, limit, why)
