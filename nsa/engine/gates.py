"""At a gate: rank 0 judges the run by what is recorded of it, and all ranks hear the verdict."""

from __future__ import annotations

from nsa.engine.consensus import RunAborted
from nsa.engine.run import Run
from nsa.gates.ladder import Gate, record
from nsa.gates.ladder import judge as verdict_of


def judge(run: Run, gate: Gate) -> None:
    """Go on where the verdict is Go; raise RunAborted on all ranks where it is No-Go."""
    run.telemetry.heartbeat.write_soon()
    with run.throughput.paused():
        refusal = _judge(run, gate) if run.ranks.rank == 0 else None
        refusal = run.consensus.broadcast(refusal)
    if refusal is not None:
        raise RunAborted(refusal)


def _judge(run: Run, gate: Gate) -> str | None:
    """Why not to go on; None for Go."""
    try:
        for writer in run.writers:
            writer.flush()
        verdict = verdict_of(run.run_dir, gate, run.config.monitor.ladder)
        record(run.run_dir, verdict)
    except Exception as error:  # the others wait for an answer whatever went wrong here
        run.observers.on_message(f"gate {gate.name} is NOT JUDGED, training goes on: {error!r}")
        return None
    run.observers.on_message(verdict.summary)
    run.observers.on_gate(gate.name, verdict.go)
    return None if verdict.go else verdict.summary
