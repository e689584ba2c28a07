"""Withdrawn settings, values, flags and verbs: refused by name, with what to do instead.

A checkpoint of an earlier version still resumes: `drop_withdrawn` ignores these entries of its
config.yaml, and reports those whose value this version does not have.
"""

from __future__ import annotations

from typing import Any

REMOVE = "remove it"  # advice where nothing replaces it

# Setting -> the value that this version always has, and what to do instead.
SETTINGS: dict[str, tuple[Any, str]] = {
    "checkpoint.background": (False, REMOVE),
    "checkpoint.keep_hours": (0.0, "set checkpoint.keep"),
    "monitor.heartbeat": (5.0, REMOVE),
    "monitor.private": (False, "run under umask 077"),
    "monitor.kernel_check": (True, REMOVE),
    "monitor.progress": (True, REMOVE),
    "monitor.report": (True, REMOVE),
    "monitor.ladder.sanity": (1, REMOVE),
    "monitor.ladder.require_fall": (True, "remove it; it is off with train.start_from"),
    "monitor.ladder.max_memory_growth": (0.05, REMOVE),
    "monitor.ladder.max_pause": (120.0, REMOVE),
    "monitor.ladder.max_gpu_imbalance": (0.1, REMOVE),
    "monitor.ladder.max_skipped": (0.0, REMOVE),
    "monitor.ladder.min_gate": (0.0, REMOVE),
    "monitor.ladder.min_gpu_busy": (0.8, REMOVE),
    "monitor.ladder.max_step_spread": (2.0, REMOVE),
    "model.attention.compressor_hidden": (None, REMOVE),  # None: head_dim
    "model.attention.shared_kv": (False, REMOVE),
    "model.init_std": (0.02, REMOVE),
    "monitor.watch.collapse": (0.2, REMOVE),
    "monitor.watch.data": (900.0, "set monitor.watch.compute, which includes waiting for data"),
    "monitor.watch.dead_gate": (0.001, "read the gates in selection.csv"),
    "monitor.watch.evaluation": (1_800.0, "set monitor.watch.save, which includes evaluation"),
    "monitor.watch.grace": (30.0, REMOVE),
    "monitor.watch.on_dead_gate": ("warn", "read the gates in selection.csv"),
    "data.files": (None, "set data.pattern, which applies to hub datasets too"),
    "data.prefetch": (8, REMOVE),
    "data.shuffle_documents": (1_000, REMOVE),
    "data.synthetic_bytes": (4_000_000, REMOVE),
    "data.workers": (1, REMOVE),
    "train.freeze": (None, REMOVE),
    "train.compile": (False, REMOVE),
    "train.sequence_parallel": (1, "remove it; lower train.micro_batch if memory is short"),
    "train.teacher_weight": (1.0, REMOVE),
    "train.beta1": (0.9, 'set "betas" in optimizer.params of DeepSpeed\'s JSON'),
    "train.beta2": (0.95, 'set "betas" in optimizer.params of DeepSpeed\'s JSON'),
    "train.adam_eps": (1e-8, 'set "eps" in optimizer.params of DeepSpeed\'s JSON'),
    "train.bad_steps": (20, REMOVE),
    "train.on_spike": ("ignore", "read the loss in metrics.csv"),
    "train.spike_score": (12.0, REMOVE),
}

# Setting and withdrawn value -> the value that a resumed run has instead.
VALUES: dict[tuple[str, Any], Any] = {("train.on_bad_step", "rollback"): "skip"}

# Program or verb, and flag ("nsa plan --search") -> what to do instead.
FLAGS: dict[str, str] = {
    "nsa import --shares": "remove it; a dense model keeps its keys and values",
    "nsa import --tokens": "set train.steps and train.warmup_steps",
    "nsa import --gap": "compare `nsa eval` of the import and of the dense model",
    "nsa data prepare --files": "use --pattern",
    "nsa data prepare --workers": "remove it; all CPU cores tokenise",
    "nsa data check --seq-len": "remove it; a run logs the samples and epochs that it reads",
    "nsa data check --samples-per-step": "remove it; a run logs the epochs that it reads",
    "nsa data check --steps": "remove it; a run logs the epochs that it reads",
    "nsa eval --stride": "remove it; give several lengths with --seq-len",
    "nsa doctor --tune": "remove it; python -m tests.bench module --tile N measures tile sizes",
    "nsa doctor --kernels": "remove it; a recipe checks its own kernels: --until preflight",
    "nsa watch --backoff": "remove it; a restart waits 10 s",
    "nsa watch --status": "read the last line of each heartbeat_rank<k>.jsonl in the run's folder",
    "nsa check --quiet": "remove it; the summary is on stderr",
    "nsa check --json": "remove it; stdout is JSON",
    "nsa plan --search": "plan each config, with --set train.micro_batch=auto",
    "nsa plan --compare": "plan each config: --deepspeed_config",
}

# Verb of `nsa`, or verb and action -> what to do instead.
VERBS: dict[str, str] = {
    "bench": "run python -m tests.bench in a clone",
    "tasks": "run python -m tests.bench recall in a clone",
    "completion": "no verb replaces it",
    "data train-tokenizer": "train one with the library tokenizers: docs/start/your-data.md",
    "info": "run nsa plan, or a recipe with --dry-run",
}


def check_setting(name: str, value: Any, source: str) -> None:
    """Raise a ValueError if the setting, or this value of it, is withdrawn."""
    if name in SETTINGS:
        raise ValueError(f"{source}: {name} is withdrawn in this version; {SETTINGS[name][1]}")
    if isinstance(value, str) and (name, value) in VALUES:
        raise ValueError(
            f"{source}: {name} = {value!r} is withdrawn in this version; set it to "
            f"{VALUES[name, value]!r}"
        )


def drop_withdrawn(tree: Any, path: str = "") -> tuple[Any, list[str]]:
    """Return a saved config without withdrawn entries, and a line for each whose value is lost."""
    if not isinstance(tree, dict):
        return tree, []
    kept, lost = {}, list[str]()
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if name in SETTINGS:
            always, _ = SETTINGS[name]
            if value != always:
                lost.append(f"{name} = {value!r}: withdrawn in this version, which has {always!r}")
        elif isinstance(value, str) and (name, value) in VALUES:
            kept[key] = VALUES[name, value]
            lost.append(f"{name} = {value!r}: withdrawn in this version, which has {kept[key]!r}")
        else:
            kept[key], more = drop_withdrawn(value, name)
            lost += more
    return kept, lost
