"""Criteria of the go/no-go gates, and the inputs that they are computed from."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean, median

from nsa.constants import SHORT_RUN
from nsa.doctor.node import FAIL, OK, SKIP, WARN, Check
from nsa.gates.results import GATE_NAMES, PREFLIGHT, Criterion, Gate, GateResult, gate_result
from nsa.monitor.artifacts import RankHistory, Row, Table, finite_number
from nsa.monitor.config import LadderConfig

MAX_PAUSE = 120.0  # seconds without a step, outside evaluation and saving
MAX_STEP_SPREAD = 2.0  # p90 / median step time
MIN_GPU_BUSY = 0.8  # mean GPU utilization of each rank, 0 to 1
MAX_GPU_IMBALANCE = 0.1  # highest minus lowest GPU utilization of the ranks
MAX_MEMORY_GROWTH = 0.05  # growth of peak memory in the run's second half, a fraction
MIN_TIMED_STEPS = 20  # logged steps needed to judge the spread of step times
MIN_STEPS_FOR_GROWTH = SHORT_RUN  # in shorter runs caches still fill in the first half
# In earlier steps attention is spread evenly, so random blocks hold as much as selected ones.
MIN_STEPS_FOR_RECALL = SHORT_RUN
RECALL_STEPS = 40  # newest logged steps that recall is a mean of
MIN_LOSSES = 4  # logged steps needed to compare the last losses with the first
_COMPARE = {"at most": operator.le, "at least": operator.ge, "below": operator.lt}


@dataclass(frozen=True)
class GateInputs:
    """What a run has recorded up to the step of a gate."""

    step: int
    metrics: Table  # rows of metrics.csv
    selection: Table  # rows of selection.csv
    histories: list[RankHistory]  # of each rank
    switch_step: int = 0  # train.dense_steps: attention is dense up to this step
    new_weights: bool = True  # False with train.start_from, whose loss may be low already
    on_gpu: bool = False

    @cached_property
    def rows(self) -> list[Row]:
        return [row for row in self.metrics.rows if 1 <= row["step"] <= self.step]

    def values(self, column: str) -> tuple[list[tuple[float, float]], str]:
        """Return (step, value) of each logged step, and a text that names the values' source."""
        values = [(row["step"], row[column]) for row in self.rows if column in row]
        return values, self.source(column, len(values))

    def timed(self, column: str) -> list[float]:
        """Return the finite values of a column at all steps but each launch's first.

        A first step compiles and fills caches; its row has no tokens/s.
        """
        return [
            row[column]
            for row in self.rows
            if "tokens_per_s" in row and math.isfinite(row.get(column, math.nan))
        ]

    def source(self, column: str, count: int) -> str:
        text = f"metrics.csv, {column}, {count:,} rows, steps 1 to {self.step:,}"
        return f"{text}; {self.metrics.problem}" if self.metrics.problem else text


class NotMeasured(Exception):
    """The reason why a value cannot be measured."""


Measurement = tuple[float, str]  # value, source


def judge(gate: Gate, inputs: GateInputs, config: LadderConfig) -> GateResult:
    """Return Go or No-Go, with all criteria of the gate and of those before it."""
    criteria = [_steps_recorded(inputs), _loss_finite(inputs)]
    for first_gate, name, limit, comparison, measure in _criteria(config):
        if GATE_NAMES.index(gate.name) < GATE_NAMES.index(first_gate):
            continue
        if not limit:
            criteria.append(Criterion(name, None, None, "", "switched off in monitor.ladder"))
            continue
        shown_limit = f"{comparison} {limit:g}"
        try:
            value, source = measure(inputs)
        except NotMeasured as reason:
            criteria.append(Criterion(name, None, None, shown_limit, str(reason)))
        else:
            ok = _COMPARE[comparison](value, limit)
            criteria.append(Criterion(name, ok, finite_number(value), shown_limit, source))
    return gate_result(gate.name, gate.step, criteria)


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


def _steps_recorded(inputs: GateInputs) -> Criterion:
    """Require heartbeats of rank 0 for each step up to the gate, of other ranks for the last.

    A run may have been resumed on more ranks, so the others need not have the steps before.
    """
    steps = set[int]()  # of rank 0; spans overlap where a restart repeated steps
    for before, last in inputs.histories[0].spans:
        steps.update(range(before + 1, min(last, inputs.step) + 1))
    recorded = {history.rank: history.step for history in inputs.histories}
    recorded[0] = len(steps)
    worst = min(recorded, key=lambda rank: recorded[rank])
    value, source = recorded[worst], f"heartbeats of {len(recorded)} ranks"
    if value < inputs.step:
        source += f"; rank {worst} has recorded {value:,} steps"
    value = min(value, inputs.step)
    return Criterion(
        "steps recorded", value == inputs.step, float(value), f"all {inputs.step:,}", source
    )


def _loss_finite(inputs: GateInputs) -> Criterion:
    """Tolerate one non-finite loss per skipped step: its gradients never reached the weights."""
    losses, source = inputs.values("loss")
    bad = [step for step, loss in losses if not math.isfinite(loss)]
    skipped = max(history.skipped or 0 for history in inputs.histories)
    if bad:
        source += f"; not finite at step {', '.join(f'{step:,.0f}' for step in bad[:5])}"
    if bad and skipped:
        source += f"; {skipped:,} steps were skipped"
    limit = f"at most {skipped}, the skipped steps" if skipped else "none"
    if not losses:
        return Criterion("non-finite losses", None, None, limit, source)
    return Criterion("non-finite losses", len(bad) <= skipped, float(len(bad)), limit, source)


def _loss_ratio(inputs: GateInputs) -> Measurement:
    if not inputs.new_weights:
        raise NotMeasured("the run started from trained weights, train.start_from")
    rows, source = inputs.values("loss")
    losses = [loss for _, loss in rows if math.isfinite(loss)]
    if len(losses) < MIN_LOSSES:
        raise NotMeasured(f"{len(losses)} finite losses, {MIN_LOSSES} are needed; {source}")
    width = max(1, min(20, len(losses) // 5))
    first, last = fmean(losses[:width]), fmean(losses[-width:])
    source += f"; means of the first and last {width}: {first:.4g}, {last:.4g}"
    return last / first if first else math.inf, source


def _longest_pause(inputs: GateInputs) -> Measurement:
    seconds = median(inputs.timed("seconds") or [0.0])
    if seconds > MAX_PAUSE:  # long sequences on a CPU
        raise NotMeasured(f"a step takes {seconds:.0f} s, longer than a pause may be")
    worst = max(inputs.histories, key=lambda history: history.pause)
    source = f"heartbeats of {len(inputs.histories)} ranks since the last start"
    return worst.pause, f"{source}; {worst.pause_at or 'no pause'}"


def _step_time_spread(inputs: GateInputs) -> Measurement:
    if not inputs.on_gpu:
        raise NotMeasured("step times on shared CPUs vary")
    times = sorted(inputs.timed("seconds"))
    if len(times) < MIN_TIMED_STEPS or median(times) <= 0:
        raise NotMeasured(
            f"{len(times)} logged steps were timed after warm-up, {MIN_TIMED_STEPS} are needed"
        )
    middle, p90 = median(times), times[math.ceil(0.9 * len(times)) - 1]
    source = inputs.source("seconds", len(times))
    return p90 / middle, f"{source}; median {middle:.3g} s, p90 {p90:.3g} s"


def _tokens_per_s(inputs: GateInputs) -> Measurement:
    rates = inputs.timed("tokens_per_s")
    if not rates:
        raise NotMeasured("metrics.csv holds no tokens/s")
    return median(rates), inputs.source("tokens_per_s", len(rates))


def _utilization(inputs: GateInputs, reduce: Callable[[list[float]], float]) -> Measurement:
    means = {history.rank: history.gpu_utilization for history in inputs.histories}
    if missing := [str(rank) for rank, mean in means.items() if mean is None]:
        raise NotMeasured(f"no gpu_busy in the heartbeats of ranks {', '.join(missing)}")
    values = [mean for mean in means.values() if mean is not None]
    shown = ", ".join(f"rank {rank} {mean:.2f}" for rank, mean in list(means.items())[:8])
    return reduce(values), f"gpu_busy of heartbeats between steps: {shown}"


def _recall(inputs: GateInputs) -> Measurement:
    """Return the best layer's ratio of attention on selected blocks to attention on random blocks.

    The best, because in a layer that spreads attention evenly no selection beats a random one.
    """
    if inputs.step < MIN_STEPS_FOR_RECALL:
        raise NotMeasured(f"{inputs.step:,} steps, {MIN_STEPS_FOR_RECALL} are needed")
    if inputs.step <= inputs.switch_step:
        raise NotMeasured(f"attention is dense until step {inputs.switch_step:,}")
    rows = [row for row in inputs.selection.rows if row["step"] <= inputs.step]
    newest = set(sorted({row["step"] for row in rows})[-RECALL_STEPS:])
    layers: dict[float, list[Row]] = {}
    columns = {"layer", "recall", "recall_random"}
    for row in rows:
        if row["step"] in newest and columns.issubset(row) and row["recall_random"]:
            layers.setdefault(row["layer"], []).append(row)
    if not layers:
        raise NotMeasured(
            f"{inputs.selection.problem or 'selection.csv holds no recall'} (it needs the selector "
            "loss, and more blocks than are selected)"
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
    if logged:  # on rank 0, whose heartbeats may be too rare in a short run
        peaks[0] = max(*logged, peaks.get(0, 0.0))
    if not peaks:
        raise NotMeasured("no memory in heartbeats or metrics.csv")
    worst = max(peaks, key=lambda rank: peaks[rank])
    ranks = ", ".join(map(str, sorted(peaks)))
    return peaks[worst], f"heartbeats and metrics.csv of ranks {ranks}; rank {worst} is the highest"


def _memory_growth(inputs: GateInputs) -> Measurement:
    # Sparse attention needs other memory than dense attention: compare sparse steps only.
    first = inputs.switch_step if inputs.switch_step < inputs.step else 0
    if inputs.step - first < MIN_STEPS_FOR_GROWTH:
        raise NotMeasured(f"{inputs.step - first:,} steps, {MIN_STEPS_FOR_GROWTH} are needed")
    middle = (first + inputs.step) / 2
    growth = {}
    for history in inputs.histories:
        early = [memory for step, memory in history.memory if step <= middle]
        if not early:
            raise NotMeasured(f"rank {history.rank} recorded no memory")
        growth[history.rank] = history.memory[-1][1] / early[-1] - 1
    worst = max(growth, key=lambda rank: growth[rank])
    return growth[worst], f"heartbeats of {len(growth)} ranks; rank {worst} grew the most"


def _criteria(
    config: LadderConfig,
) -> list[tuple[str, str, float, str, Callable[[GateInputs], Measurement]]]:
    """Return each criterion: first gate that has it, name, limit (0: off), comparison, value."""
    busy = partial(_utilization, reduce=min)
    spread = partial(_utilization, reduce=lambda values: max(values) - min(values))
    smoke, extended = "smoke", "extended"
    return [
        (smoke, "final / initial loss", 1.0, "below", _loss_ratio),
        (smoke, "longest pause, seconds", MAX_PAUSE, "at most", _longest_pause),
        (smoke, "p90 / median step time", MAX_STEP_SPREAD, "at most", _step_time_spread),
        (smoke, "median tokens/s", config.min_tokens_per_s, "at least", _tokens_per_s),
        (smoke, "min GPU utilization", MIN_GPU_BUSY, "at least", busy),
        (smoke, "GPU utilization spread", MAX_GPU_IMBALANCE, "at most", spread),
        (extended, "recall of selected / random blocks", config.min_recall, "at least", _recall),
        (extended, "peak memory of any rank, GB", config.max_memory_gb, "below", _peak_memory),
        (extended, "peak-memory growth, second half", MAX_MEMORY_GROWTH, "at most", _memory_growth),
    ]
