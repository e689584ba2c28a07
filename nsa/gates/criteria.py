"""Criteria of the go/no-go gates, and the inputs that they are computed from."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean, median

from nsa.constants import BRANCHES, SHORT_RUN
from nsa.doctor.check import FAIL, OK, SKIP, WARN, Check
from nsa.gates.results import Criterion, GateResult, gate_result
from nsa.gates.schedule import GATE_NAMES, PREFLIGHT, Gate
from nsa.monitor.artifacts import Row, Table, finite_number
from nsa.monitor.config import LadderConfig
from nsa.monitor.history import RankHistory

MIN_TIMED_STEPS = 20  # logged steps needed to judge the spread of step times
MIN_STEPS_FOR_GROWTH = SHORT_RUN  # in shorter runs caches still fill in the first half
# Before, attention is spread evenly, so that any blocks hold as much.
MIN_STEPS_FOR_RECALL = SHORT_RUN
MIN_LOSSES = 4  # logged steps needed to compare the last losses with the first


@dataclass(frozen=True)
class GateInputs:
    """What a run has recorded up to the step of a gate."""

    previous_step: int  # step of the previous gate; 0: none
    step: int
    log_every: int
    metrics: Table  # rows of metrics.csv
    selection: Table  # the newest rows of selection.csv
    histories: list[RankHistory]  # of each rank
    sparse_after: int = 0  # steps in which attention is dense, train.dense_steps

    @cached_property
    def rows(self) -> list[Row]:
        return [row for row in self.metrics.rows if 1 <= row["step"] <= self.step]

    def values(self, column: str) -> tuple[list[tuple[float, float]], str]:
        """Return (step, value) of the logged steps, and a text that names their source."""
        values = [(row["step"], row[column]) for row in self.rows if column in row]
        return values, self.source(column, len(values))

    def recent(self, column: str) -> list[float]:
        """Return the finite values since the previous gate, without each launch's first step.

        That step compiles and fills caches; its row has no tokens/s.
        """
        rows = [row for row in self.rows if row["step"] > self.previous_step]
        return [
            row[column]
            for row in rows
            if "tokens_per_s" in row and math.isfinite(row.get(column, math.nan))
        ]

    def source(self, column: str, count: int, since: int = 0) -> str:
        text = f"metrics.csv, {column}, {count:,} rows, steps {since + 1:,} to {self.step:,}"
        return f"{text}; {self.metrics.problem}" if self.metrics.problem else text


class NotMeasured(Exception):
    """The reason why a value cannot be measured."""


Measurement = tuple[float, str]  # value, source


def judge(gate: Gate, inputs: GateInputs, config: LadderConfig) -> GateResult:
    """Return Go or No-Go, with all criteria of the gate and of those before it."""
    return gate_result(gate.name, gate.step, _judge_criteria(gate.name, inputs, config))


def preflight(checks: Iterable[Check]) -> GateResult:
    """Return the result of the node and rank checks; a skipped check is not measured."""
    ok = {OK: True, WARN: True, FAIL: False, SKIP: None}
    criteria = []
    for check in checks:
        evidence = check.detail
        if check.status in (WARN, FAIL):
            evidence = f"{check.status}: {evidence}" + (f"; {check.fix}" if check.fix else "")
        criteria.append(Criterion(check.name, ok[check.status], None, "", evidence))
    return gate_result(PREFLIGHT, 0, criteria)


def _judge_criteria(gate: str, inputs: GateInputs, config: LadderConfig) -> list[Criterion]:
    """Judge a run by the criteria of `gate` and of all gates before it."""
    criteria = [_steps_recorded(inputs), _slowest_rank(inputs), _loss_finite(inputs)]
    for first_gate, name, setting, comparison, measure in _CRITERIA:
        if GATE_NAMES.index(gate) >= GATE_NAMES.index(first_gate):
            threshold = float(getattr(config, setting))
            limit = f"{comparison} {threshold:g}" if threshold else ""
            try:
                if not threshold:
                    raise NotMeasured(f"switched off by monitor.ladder.{setting}")
                value, source = measure(inputs)
                ok = _COMPARE[comparison](value, threshold)
                criteria.append(Criterion(name, ok, finite_number(value), limit, source))
            except NotMeasured as reason:
                criteria.append(Criterion(name, None, None, limit, str(reason)))
    return [*criteria, _validation_loss(inputs)] if gate == "production" else criteria


def _steps_recorded(inputs: GateInputs) -> Criterion:
    """Require each step up to the gate in a logged row or in rank 0's heartbeats.

    A row covers the `log_every` steps up to its own.
    """
    spans = [(int(row["step"]) - inputs.log_every, int(row["step"])) for row in inputs.rows]
    spans += inputs.histories[0].spans
    gaps = list(_gaps(spans, inputs.step))
    missing = sum(last - first + 1 for first, last in gaps)
    source = f"metrics.csv (rows: {len(inputs.rows):,}) and rank 0's heartbeats"
    if gaps:
        shown = ", ".join(f"{first:,}-{last:,}" for first, last in gaps[:5])
        more = f" and {len(gaps) - 5} more gaps" if len(gaps) > 5 else ""
        source += f"; no record of steps {shown}{more}"
    value = float(inputs.step - missing)
    return Criterion("steps recorded", not gaps, value, f"all {inputs.step:,}", source)


def _gaps(spans: Iterable[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    """Yield the first and last step of each gap that the spans (from, to] leave in 1 … `step`."""
    reached = 0
    for start, end in sorted(spans):
        if start > reached:
            yield reached + 1, min(start, step)
        reached = max(reached, end)
    if reached < step:
        yield reached + 1, step


def _slowest_rank(inputs: GateInputs) -> Criterion:
    name, limit = "slowest rank's step", f"{inputs.step:,}"
    if not any(history.lines for history in inputs.histories):
        return Criterion(name, None, None, limit, "no heartbeats (monitor.heartbeat)")
    slowest = min(inputs.histories, key=lambda history: history.step)
    source = f"heartbeats of {len(inputs.histories)} ranks; rank {slowest.rank} is the slowest"
    return Criterion(name, slowest.step >= inputs.step, float(slowest.step), limit, source)


def _loss_finite(inputs: GateInputs) -> Criterion:
    """Tolerate one non-finite loss per skipped step, whose gradients never reached the weights."""
    losses, source = inputs.values("loss")
    bad = [step for step, loss in losses if not math.isfinite(loss)]
    skipped = _skipped(inputs) or 0
    if bad:
        source += f"; not finite at step {', '.join(f'{step:,.0f}' for step in bad[:5])}"
    if bad and skipped:
        source += f"; {skipped:,} steps were skipped"
    limit = f"at most {skipped}, the skipped steps" if skipped else "none"
    ok, value = (len(bad) <= skipped, float(len(bad))) if losses else (None, None)
    return Criterion("non-finite losses", ok, value, limit, source)


def _loss_ratio(inputs: GateInputs) -> Measurement:
    rows, source = inputs.values("loss")
    losses = [loss for _, loss in rows if math.isfinite(loss)]
    if len(losses) < MIN_LOSSES:
        raise NotMeasured(f"{len(losses)} finite losses, {MIN_LOSSES} are needed; {source}")
    width = max(1, min(20, len(losses) // 5))
    first, last = fmean(losses[:width]), fmean(losses[-width:])
    source += f"; means of the first and last {width}: {first:.4g}, {last:.4g}"
    return last / first if first else math.inf, source


def _longest_pause(inputs: GateInputs) -> Measurement:
    if not all(history.lines for history in inputs.histories):
        raise NotMeasured("not every rank has heartbeats")
    worst = max(inputs.histories, key=lambda history: history.pause)
    source = f"heartbeats of {len(inputs.histories)} ranks; {worst.pause_at or 'no pause'}"
    return worst.pause, source


def _step_time_spread(inputs: GateInputs) -> Measurement:
    times = sorted(inputs.recent("seconds"))
    if len(times) < MIN_TIMED_STEPS or median(times) <= 0:
        raise NotMeasured(
            f"{len(times)} logged steps were timed after warm-up, {MIN_TIMED_STEPS} are needed"
        )
    middle, p90 = median(times), times[math.ceil(0.9 * len(times)) - 1]
    source = inputs.source("seconds", len(times), inputs.previous_step)
    return p90 / middle, f"{source}; median {middle:.3g} s, p90 {p90:.3g} s"


def _tokens_per_s(inputs: GateInputs) -> Measurement:
    rates = inputs.recent("tokens_per_s")
    if not rates:
        raise NotMeasured("no logged tokens/s since the previous gate")
    return median(rates), inputs.source("tokens_per_s", len(rates), inputs.previous_step)


def _utilization(inputs: GateInputs, reduce: Callable[[list[float]], float]) -> Measurement:
    means = {history.rank: history.gpu_utilization for history in inputs.histories}
    if missing := [str(rank) for rank, mean in means.items() if mean is None]:
        raise NotMeasured(f"no gpu_busy in the heartbeats of ranks {', '.join(missing)}")
    values = [mean for mean in means.values() if mean is not None]
    shown = ", ".join(f"rank {rank} {mean:.2f}" for rank, mean in list(means.items())[:8])
    return reduce(values), f"gpu_busy of heartbeats between steps: {shown}"


def _skipped_fraction(inputs: GateInputs) -> Measurement:
    skipped = _skipped(inputs)
    if skipped is None:
        raise NotMeasured("no heartbeats")
    return skipped / inputs.step, f"heartbeats: {skipped:,} of {inputs.step:,} steps"


def _skipped(inputs: GateInputs) -> int | None:
    counts = (history.skipped for history in inputs.histories)
    return max((count for count in counts if count is not None), default=None)


def _min_mean_gate(inputs: GateInputs) -> Measurement:
    rows = [row for row in inputs.selection.rows if row["step"] <= inputs.step]
    newest = rows[-1]["step"] if rows else 0
    layers = [row for row in rows if row["step"] == newest > inputs.previous_step]
    means = {
        branch: fmean(row[f"gate_{branch}"] for row in layers)
        for branch in BRANCHES
        if layers and all(f"gate_{branch}" in row for row in layers)
    }
    if not means:
        why = inputs.selection.problem or "no gates were logged since the previous gate"
        raise NotMeasured(f"{why} (dense attention has no gates)")
    shown = ", ".join(f"{branch} {mean:.3f}" for branch, mean in means.items())
    source = f"selection.csv, {len(layers)} layers at step {newest:,.0f}: {shown}"
    return math.nan if any(map(math.isnan, means.values())) else min(means.values()), source


def _recall(inputs: GateInputs) -> Measurement:
    """Return the attention that selected blocks hold over that of random ones, in the best layer.

    Where attention is even, as in the first steps, any selection is as good as a random one; so
    one layer is enough.
    """
    if inputs.step < MIN_STEPS_FOR_RECALL:
        raise NotMeasured(f"{inputs.step:,} steps, {MIN_STEPS_FOR_RECALL} are needed")
    if inputs.step <= inputs.sparse_after:
        raise NotMeasured(f"attention is dense until step {inputs.sparse_after:,}")
    layers: dict[float, list[Row]] = {}
    for row in inputs.selection.rows:
        if inputs.previous_step < row["step"] <= inputs.step and row.get("recall_random"):
            layers.setdefault(row["layer"], []).append(row)
    if not layers:
        raise NotMeasured(
            f"{inputs.selection.problem or 'selection.csv holds no recall since the previous gate'}"
            " (it needs the selector loss, and more blocks than are selected)"
        )
    recall = {
        layer: [fmean(row[name] for row in rows) for name in ("recall", "recall_random")]
        for layer, rows in layers.items()
    }
    best = max(recall, key=lambda layer: recall[layer][0] / recall[layer][1])
    selected, random = recall[best]
    source = (
        f"selection.csv, recall, {len(layers[best]):,} rows: in layer {best:.0f}, the best of "
        f"{len(layers)}, selected blocks hold {selected:.1%} of the attention that they compete "
        f"for, random ones would hold {random:.1%}"
    )
    return selected / random, source


def _peak_memory(inputs: GateInputs) -> Measurement:
    peaks = {history.rank: history.memory[-1][1] for history in inputs.histories if history.memory}
    logged = [row["memory_gb"] for row in inputs.rows if row.get("memory_gb")]
    if logged:  # on rank 0; its heartbeats may be off, or too rare in a short run
        peaks[0] = max(*logged, peaks.get(0, 0.0))
    if not peaks:
        raise NotMeasured("no memory in heartbeats or metrics.csv")
    worst = max(peaks, key=lambda rank: peaks[rank])
    ranks = ", ".join(map(str, sorted(peaks)))
    return peaks[worst], f"heartbeats and metrics.csv of ranks {ranks}; rank {worst} is the highest"


def _memory_growth(inputs: GateInputs) -> Measurement:
    # Sparse attention needs other memory than dense: only its steps are compared.
    first = inputs.sparse_after if inputs.sparse_after < inputs.step else 0
    if inputs.step - first < MIN_STEPS_FOR_GROWTH:
        raise NotMeasured(f"{inputs.step - first:,} steps, {MIN_STEPS_FOR_GROWTH} are needed")
    growth = {}
    for history in inputs.histories:
        early = [memory for step, memory in history.memory if 2 * step <= first + inputs.step]
        if not early:
            raise NotMeasured(f"rank {history.rank} recorded no memory in the first half")
        growth[history.rank] = history.memory[-1][1] / early[-1] - 1
    worst = max(growth, key=lambda rank: growth[rank])
    return growth[worst], f"heartbeats of {len(growth)} ranks; rank {worst} grew the most"


def _validation_loss(inputs: GateInputs) -> Criterion:
    name, limit = "validation loss", "finite"
    losses, _ = inputs.values("val_loss")
    if not losses:
        return Criterion(name, None, None, limit, "metrics.csv holds no val_loss")
    step, loss = losses[-1]
    source = f"metrics.csv, val_loss of step {step:,.0f}, the last of {len(losses):,}"
    return Criterion(name, math.isfinite(loss), finite_number(loss), limit, source)


_COMPARE = {"at most": operator.le, "at least": operator.ge, "below": operator.lt}
# First gate that has the criterion, its name, the setting of `monitor.ladder` that limits it (0 or
# false: off), the comparison, the measurement. require_fall = true is a limit of 1.
_CRITERIA: tuple[tuple[str, str, str, str, Callable[[GateInputs], Measurement]], ...] = (
    ("smoke", "final / initial loss", "require_fall", "below", _loss_ratio),
    ("smoke", "longest pause, seconds", "max_pause", "at most", _longest_pause),
    ("smoke", "p90 / median step time", "max_step_spread", "at most", _step_time_spread),
    ("smoke", "median tokens/s", "min_tokens_per_s", "at least", _tokens_per_s),
    ("smoke", "min GPU utilization", "min_gpu_busy", "at least", partial(_utilization, reduce=min)),
    (
        "smoke",
        "GPU utilization spread",
        "max_gpu_imbalance",
        "at most",
        partial(_utilization, reduce=lambda values: max(values) - min(values)),
    ),
    ("smoke", "skipped-step fraction", "max_skipped", "at most", _skipped_fraction),
    ("smoke", "min mean gate", "min_gate", "at least", _min_mean_gate),
    ("extended", "recall of selected / random blocks", "min_recall", "at least", _recall),
    ("extended", "peak memory of any rank, GB", "max_memory_gb", "below", _peak_memory),
    ("extended", "peak-memory growth, second half", "max_memory_growth", "at most", _memory_growth),
)
