"""Judge the run at a gate: all ranks send their history to rank 0, which decides for all."""

from __future__ import annotations

from nsa.engine.consensus import RunAborted
from nsa.engine.run import Run
from nsa.gates import ladder, result
from nsa.gates.criteria import Evidence
from nsa.gates.ladder import Gate
from nsa.monitor.history import RankHistory


def judge(run: Run, gate: Gate) -> None:
    """Return if the gate is Go; raise RunAborted on all ranks if it is No-Go."""
    with run.throughput.paused():
        histories = run.consensus.gather(run.telemetry.history.history(gate.step))
        refusal = _judge(run, gate, histories) if run.ranks.rank == 0 else None
        refusal = run.consensus.broadcast(refusal)
    if refusal is not None:
        raise RunAborted(refusal)


def _judge(run: Run, gate: Gate, histories: list[RankHistory]) -> str | None:
    """Return why the run must stop; None if it may continue."""
    monitor, logged = run.config.monitor, run.telemetry.run_history
    try:
        evidence = Evidence(
            gate.since, gate.step, monitor.log_every, logged.metrics, logged.selection, histories
        )
        decision = ladder.judge(gate, evidence, monitor.ladder)
        result.record(run.run_dir, decision)
    except Exception as error:  # the other ranks wait for the decision, whatever fails here
        run.observers.on_message(f"gate {gate.name} is NOT JUDGED, training continues: {error!r}")
        return None
    run.observers.on_message(decision.summary)
    run.observers.on_gate(gate.name, decision.go)
    return None if decision.go else decision.summary
