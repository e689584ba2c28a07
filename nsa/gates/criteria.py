"""What a gate asks of a run, each answered from what the run has written down and nothing else."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

from nsa.monitor.artifacts import (
    RankHistory,
    Row,
    Table,
    number,
    ranks,
    read_jsonl,
    read_rank,
    read_table,
    read_text,
)
from nsa.monitor.config import LadderConfig
from nsa.monitor.observer import BRANCHES

FEWEST_TIMED = 20  # logged steps below which the spread of their times says nothing
FEWEST_GROWN = 100  # steps below which memory has no first half: caches fill, text is opened
FEWEST_LOSSES = 4  # logged steps below which the loss has no beginning and no end


@dataclass(frozen=True)
class Criterion:
    """One question of a gate; `ok` None: not measured here, which never counts as a yes."""

    name: str
    ok: bool | None
    value: float | None
    limit: str  # such as "at most 2"
    evidence: str  # the files and rows that it came from, or why it was not measured


@dataclass(frozen=True)
class Evidence:
    """What is known of a run up to a gate's step."""

    run_dir: Path
    since: int  # the step of the gate before: speed is judged from there on
    step: int
    metrics: Table  # the rows up to `step`
    selection: Table
    ranks: list[RankHistory]

    @property
    def rows(self) -> list[Row]:
        return self.metrics.rows

    def recent(self, column: str) -> list[float]:
        """The finite values of a column since the gate before, without each start's first step.

        That step compiles and fills caches, and is known by its row's missing tokens/s.
        """
        rows = (row for row in self.rows if row["step"] > self.since and "tokens_per_s" in row)
        return [row[column] for row in rows if math.isfinite(row.get(column, math.nan))]

    def rows_read(self, column: str, count: int, since: int = 0) -> str:
        said = f"metrics.csv, {column} of {count:,} rows, steps {since + 1:,} to {self.step:,}"
        return f"{said}; {self.metrics.problem}" if self.metrics.problem else said


def gather(run_dir: Path, since: int, step: int) -> Evidence:
    """Read the folder of a run once, for all criteria of the gate at `step`."""
    metrics = read_table(run_dir / "metrics.csv")
    metrics.rows = [row for row in metrics.rows if 1 <= row["step"] <= step]
    newest = {int(row["step"]) for row in metrics.rows[-5:]}  # health is written beside a row
    selection = read_table(run_dir / "selection.csv", newest)
    histories = [read_rank(run_dir, rank, since, step) for rank in ranks(run_dir)]
    return Evidence(run_dir, since, step, metrics, selection, histories)


def sanity(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """The step was done, by all, and gave a number."""
    return [_steps(evidence), _every_rank(evidence), _loss_finite(evidence)]


def smoke(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """It learns, steadily, at a speed that makes sense, with all GPUs."""
    return [
        *sanity(evidence, config),
        _loss_falls(evidence, config),
        _no_pause(evidence, config),
        _steady(evidence, config),
        _fast(evidence, config),
        *_busy(evidence, config),
        _applied(evidence, config),
        _gates_alive(evidence, config),
    ]


def extended(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """As smoke, and memory neither grows nor comes near its end."""
    return [*smoke(evidence, config), _memory(evidence, config), _memory_grows(evidence, config)]


def production(evidence: Evidence, config: LadderConfig) -> list[Criterion]:
    """As extended, and the held-out loss is a number."""
    return [*extended(evidence, config), _held_out(evidence)]


def _steps(evidence: Evidence) -> Criterion:
    """Counted from what is written about each: a verdict is never made from fewer than the gate's.

    A row of metrics.csv tells of the steps since the row that is due before it.
    """
    cadence = _log_every(evidence)
    spans = [(int(row["step"]) - cadence, int(row["step"])) for row in evidence.rows]
    for history in evidence.ranks[:1]:
        spans += history.done
    gaps = list(_gaps(spans, evidence.step))
    missing = sum(last - first + 1 for first, last in gaps)
    said = f"metrics.csv (rows: {len(evidence.rows):,}) and rank 0's heartbeats"
    if gaps:
        shown = ", ".join(f"{first:,}-{last:,}" for first, last in gaps[:5])
        more = f" and {len(gaps) - 5} more gaps" if len(gaps) > 5 else ""
        said += f"; nothing is recorded of steps {shown}{more}"
    done = float(evidence.step - missing)
    return Criterion("steps recorded", not gaps, done, f"all {evidence.step:,}", said)


def _log_every(evidence: Evidence) -> int:
    """Steps between two rows: monitor.log_every of config.yaml, or else the usual distance."""
    text = read_text(evidence.run_dir / "config.yaml") or ""
    found = re.search(r"^monitor:\n(?:[ ]+.*\n)*?[ ]+log_every: *(\d{1,9})\s*$", text, re.M)
    if found:
        return max(1, int(found[1]))
    steps = [row["step"] for row in evidence.rows]
    return max(1, int(median(b - a for a, b in pairwise(steps)))) if steps[1:] else 1


def _gaps(spans: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    """The steps of 1 to `step` that no (from, to] covers, as first and last."""
    reached = 0
    for start, end in sorted(spans):
        if start > reached:
            yield reached + 1, min(start, step)
        reached = max(reached, end)
    if reached < step:
        yield reached + 1, step


def _every_rank(evidence: Evidence) -> Criterion:
    name, limit = "slowest rank's step", f"{evidence.step:,}"
    if not any(history.lines for history in evidence.ranks):
        return _unmeasured(name, limit, "no rank has left a heartbeat (monitor.heartbeat)")
    behind = min(evidence.ranks, key=lambda history: history.step)
    said = f"heartbeats of {len(evidence.ranks)} ranks; rank {behind.rank} is the slowest"
    return Criterion(name, behind.step >= evidence.step, float(behind.step), limit, said)


def _losses(evidence: Evidence) -> tuple[list[tuple[float, float]], str]:
    """(step, loss) and where they are from: heartbeats hold the last one of each stretch."""
    losses = [(row["step"], row["loss"]) for row in evidence.rows if "loss" in row]
    if losses:
        return losses, evidence.rows_read("loss", len(losses))
    heard = [(float(step), loss) for step, loss in evidence.ranks[0].losses]
    why = evidence.metrics.problem or "metrics.csv has no column loss"
    return heard, f"{why}; {len(heard):,} losses from rank 0's heartbeats"


def _loss_finite(evidence: Evidence) -> Criterion:
    losses, said = _losses(evidence)
    wrong = [step for step, loss in losses if not math.isfinite(loss)]
    if wrong:
        said += f"; not finite at step {', '.join(f'{step:,.0f}' for step in wrong[:5])}"
    name = "losses that are not finite"
    left_out, _ = _skipped(evidence)
    if wrong and left_out:  # their gradients never reached the weights
        said += f"; {left_out:,} steps were not applied"
    limit = f"at most {left_out}, the steps not applied" if left_out else "none"
    ok = bool(losses) and len(wrong) <= (left_out or 0)  # nothing to judge by is no run that is fit
    return Criterion(name, ok, float(len(wrong)) if losses else None, limit, said)


def _loss_falls(evidence: Evidence, config: LadderConfig) -> Criterion:
    name = "loss at the end, in that of the beginning"
    if not config.require_fall:
        return _off(name, "require_fall")
    known, source = _losses(evidence)
    losses = [loss for _, loss in known if math.isfinite(loss)]
    if len(losses) < FEWEST_LOSSES:
        why = f"{len(losses)} finite losses, {FEWEST_LOSSES} are needed; {source}"
        return _unmeasured(name, "below 1", why)
    width = max(1, min(20, len(losses) // 5))
    first, last = fmean(losses[:width]), fmean(losses[-width:])
    said = f"{source}; means of {width}: {first:.4g}, {last:.4g}"
    return Criterion(name, last < first, number(last / first) if first else None, "below 1", said)


def _no_pause(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "longest pause, seconds", f"at most {config.max_pause:g}"
    if not config.max_pause:
        return _off(name, "max_pause")
    heard = [history for history in evidence.ranks if history.lines]
    if heard and len(heard) == len(evidence.ranks):
        worst = max(heard, key=lambda history: history.pause)
        said = f"heartbeats of {len(heard)} ranks; {worst.pause_at or 'no pause was seen'}"
        return Criterion(name, worst.pause <= config.max_pause, worst.pause, limit, said)
    means = evidence.recent("seconds")
    if not means:
        return _unmeasured(name, limit, "neither heartbeats of every rank nor rows of metrics.csv")
    # A row holds the mean since the row before: all of that time may have been one pause.
    longest, every = max(means), _log_every(evidence)
    said = f"no heartbeats; {evidence.rows_read('seconds', len(means), evidence.since)}"
    if longest > config.max_pause:
        return Criterion(name, False, longest, limit, said)
    if longest * every > config.max_pause:
        return _unmeasured(name, limit, f"{said}: a row is the mean of {every} steps")
    return Criterion(name, True, longest * every, limit, said)


def _steady(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "a slow step (p90), in medians", f"at most {config.max_step_spread:g}"
    if not config.max_step_spread:
        return _off(name, "max_step_spread")
    times = sorted(evidence.recent("seconds"))
    if len(times) < FEWEST_TIMED or median(times) <= 0:
        why = f"{len(times)} logged steps were timed after the warm-up, {FEWEST_TIMED} are needed"
        return _unmeasured(name, limit, why)
    middle, slow = median(times), times[math.ceil(0.9 * len(times)) - 1]
    said = evidence.rows_read("seconds", len(times), evidence.since)
    said += f"; median {middle:.3g} s, 90th percentile {slow:.3g} s"
    return Criterion(name, slow <= config.max_step_spread * middle, slow / middle, limit, said)


def _fast(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "tokens/s, median", f"at least {config.min_tokens_per_s:g}"
    if not config.min_tokens_per_s:
        return _off(name, "min_tokens_per_s")
    rates = evidence.recent("tokens_per_s")
    if not rates:
        return _unmeasured(name, limit, "metrics.csv holds no tokens/s since the gate before")
    said = evidence.rows_read("tokens_per_s", len(rates), evidence.since)
    return Criterion(name, median(rates) >= config.min_tokens_per_s, median(rates), limit, said)


def _busy(evidence: Evidence, config: LadderConfig) -> Iterator[Criterion]:
    means = {history.rank: fmean(history.busy) for history in evidence.ranks if history.busy}
    whole = bool(means) and len(means) == len(evidence.ranks)
    silent = [str(history.rank) for history in evidence.ranks if not history.busy]
    why = f"no gpu_busy in the heartbeats of ranks {', '.join(silent)}" if silent else "no ranks"
    shown = ", ".join(f"rank {rank} {mean:.2f}" for rank, mean in list(means.items())[:8])
    said = f"gpu_busy of heartbeats between steps: {shown}"
    name, limit = "share of the time that the idlest GPU works", f"at least {config.min_gpu_busy:g}"
    if not config.min_gpu_busy:
        yield _off(name, "min_gpu_busy")
    elif not whole:
        yield _unmeasured(name, limit, why)
    else:
        idlest = min(means.values())
        yield Criterion(name, idlest >= config.min_gpu_busy, idlest, limit, said)
    name, limit = "difference of the busiest and idlest", f"at most {config.max_gpu_imbalance:g}"
    if not config.max_gpu_imbalance:
        yield _off(name, "max_gpu_imbalance")
    elif not whole:
        yield _unmeasured(name, limit, why)
    else:
        apart = max(means.values()) - min(means.values())
        yield Criterion(name, apart <= config.max_gpu_imbalance, apart, limit, said)


def _applied(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "share of steps not applied", f"at most {config.max_skipped:g}"
    if not config.max_skipped:
        return _off(name, "max_skipped")
    skipped, source = _skipped(evidence)
    if skipped is None:
        return _unmeasured(name, limit, source)
    share = skipped / evidence.step
    said = f"{source}: {skipped:,} of {evidence.step:,}"
    return Criterion(name, share <= config.max_skipped, share, limit, said)


def _skipped(evidence: Evidence) -> tuple[int | None, str]:
    """How many steps were not applied, and who says so."""
    counts = [history.skipped for history in evidence.ranks if history.skipped is not None]
    if counts:
        return max(counts), f"heartbeats of {len(counts)} ranks"
    counts = [int(row["skipped_steps"]) for row in evidence.rows[-1:] if "skipped_steps" in row]
    if counts:
        return counts[0], "metrics.csv, the last row"
    return None, "neither heartbeats nor metrics.csv say what was skipped"


def _gates_alive(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "lowest mean gate of a branch", f"at least {config.min_gate:g}"
    if not config.min_gate:
        return _off(name, "min_gate")
    table = evidence.selection
    newest = table.rows[-1]["step"] if table.rows else 0
    rows = [row for row in table.rows if row["step"] == newest and newest > evidence.since]
    columns = {branch: f"gate_{branch}" for branch in BRANCHES}
    means = {
        branch: fmean(row[column] for row in rows)
        for branch, column in columns.items()
        if rows and all(column in row for row in rows)
    }
    if not means:
        why = table.problem or "selection.csv tells of no gates since the gate before"
        return _unmeasured(name, limit, f"{why} (dense attention has no gates)")
    shown = ", ".join(f"{branch} {mean:.3f}" for branch, mean in means.items())
    said = f"selection.csv, {len(rows)} layers at step {newest:,.0f}: {shown}"
    lowest = math.nan if any(map(math.isnan, means.values())) else min(means.values())
    return Criterion(name, lowest >= config.min_gate, number(lowest), limit, said)


def _memory(evidence: Evidence, config: LadderConfig) -> Criterion:
    name, limit = "peak memory of any rank, GB", f"below {config.max_memory_gb:g}"
    if not config.max_memory_gb:
        return _off(name, "max_memory_gb")
    peaks = {}
    for history in evidence.ranks:
        samples = [memory for _, memory in _samples(evidence, history)]
        lines = read_jsonl(evidence.run_dir / "memory" / f"rank{history.rank}.jsonl")
        samples += (number(line.get("peak_gb")) or 0.0 for line in lines if _upto(line, evidence))
        if samples:
            peaks[history.rank] = max(samples)
    if not peaks:
        return _unmeasured(name, limit, "neither heartbeats nor memory/ nor metrics.csv tell of it")
    worst = max(peaks, key=lambda rank: peaks[rank])
    said = f"heartbeats, memory/ and metrics.csv of ranks {', '.join(map(str, peaks))}"
    silent = len(evidence.ranks) - len(peaks)
    if peaks[worst] < config.max_memory_gb and silent:
        return _unmeasured(name, limit, f"{said} only: {peaks[worst]:.3g}")
    said += f"; the highest is rank {worst}'s"
    return Criterion(name, peaks[worst] < config.max_memory_gb, peaks[worst], limit, said)


def _memory_grows(evidence: Evidence, config: LadderConfig) -> Criterion:
    name = "growth of peak memory in the second half"
    limit = f"at most {config.max_memory_growth:g}"
    if not config.max_memory_growth:
        return _off(name, "max_memory_growth")
    if evidence.step < FEWEST_GROWN:
        return _unmeasured(name, limit, f"{evidence.step:,} steps, {FEWEST_GROWN} are needed")
    growth = {}
    for history in evidence.ranks:
        samples = _samples(evidence, history)
        early = [memory for step, memory in samples if 2 * step <= evidence.step]
        if early and max(early) > 0:
            growth[history.rank] = max(memory for _, memory in samples) / max(early) - 1
    if not growth:
        return _unmeasured(name, limit, "no rank has told of its memory in the first half")
    worst = max(growth, key=lambda rank: growth[rank])
    said = f"memory_gb of ranks {', '.join(map(str, growth))}; rank {worst} grew the most"
    ok = growth[worst] <= config.max_memory_growth
    if ok and len(growth) < len(evidence.ranks):
        return _unmeasured(name, limit, f"{said}: {growth[worst]:.1%}; the others are not known")
    return Criterion(name, ok, growth[worst], limit, said)


def _samples(evidence: Evidence, history: RankHistory) -> Sequence[tuple[float, float]]:
    """(step, GB) of one rank: by its heartbeats, or for rank 0, where it has none, by its rows."""
    if history.memory or history.rank:
        return history.memory
    return [(row["step"], row["memory_gb"]) for row in evidence.rows if row.get("memory_gb")]


def _upto(line: dict[str, object], evidence: Evidence) -> bool:
    step = number(line.get("step"))
    return step is not None and step <= evidence.step


def _held_out(evidence: Evidence) -> Criterion:
    losses = [(row["step"], row["val_loss"]) for row in evidence.rows if "val_loss" in row]
    if not losses:
        return _unmeasured("held-out loss", "finite", "metrics.csv holds no val_loss")
    step, loss = losses[-1]
    said = f"metrics.csv, val_loss of step {step:,.0f}, the last of {len(losses):,}"
    return Criterion("held-out loss", math.isfinite(loss), number(loss), "finite", said)


def _off(name: str, setting: str) -> Criterion:
    return _unmeasured(name, "", f"switched off by monitor.ladder.{setting}")


def _unmeasured(name: str, limit: str, why: str) -> Criterion:
    return Criterion(name, None, None, limit, why)
