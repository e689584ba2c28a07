"""What is written down about a run, how often, and what is made of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

ACTIONS = ("ignore", "warn", "halt")


@dataclass
class LadderConfig:
    """The gates that a run passes, and the criteria of Go; 0 switches a criterion off."""

    sanity: int = 1  # steps after which the first gate stands
    smoke: int = 300  # the second's; the loss has to fall by then
    extended: int = 1_000  # the third's; memory has to be steady by then
    min_tokens_per_s: float = 50.0  # all ranks, the median since the last gate
    max_memory_gb: float = 60.0  # peak of any rank
    max_memory_growth: float = 0.05  # of the peak, from the middle of the run to its end
    max_step_spread: float = 2.0  # 90th percentile of a step's seconds, in medians
    max_pause: float = 120.0  # seconds without a step, outside evaluation and saving
    min_gpu_busy: float = 0.8  # mean share of the time, each rank
    max_gpu_imbalance: float = 0.1  # difference between the busiest and the idlest rank
    max_skipped: float = 0.01  # steps that were not applied, as a share
    min_gate: float = 0.01  # mean gate of each branch, from the second gate on
    require_fall: bool = True  # the loss at the second gate and later is below the first steps'

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        for name, value in asdict(self).items():
            if value < 0:
                raise ValueError(f"monitor.ladder.{name} = {value}: must be 0 or more")
        if not 0 < self.sanity < self.smoke < self.extended:
            raise ValueError(
                f"monitor.ladder: sanity = {self.sanity}, smoke = {self.smoke}, extended = "
                f"{self.extended}: each must be above the one before, the first above 0"
            )


@dataclass
class WatchConfig:
    """What `nsa watch` takes for a stall or a sickness; seconds, 0 switches a limit off."""

    setup: float = 1_800.0  # from the start to the first step, compiling included
    data: float = 900.0  # waiting for a batch, beyond data.timeout's own end
    compute: float = 600.0  # one forward, backward or optimizer step
    evaluation: float = 1_800.0  # one look at the held-out text
    save: float = 1_800.0  # one checkpoint
    silence: float = 60.0  # no line from a rank at all, though its process lives
    grace: float = 30.0  # between SIGTERM and SIGKILL
    collapse: float = 0.2  # tokens/s below this share of the run's median for ten logged steps
    on_collapse: str = "warn"  # ignore, warn or halt
    dead_gate: float = 0.001  # a branch whose mean gate stays below this for ten logged steps
    on_dead_gate: str = "warn"  # ignore, warn or halt

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        for name, value in asdict(self).items():
            if name.startswith("on_"):
                if value not in ACTIONS:
                    raise ValueError(
                        f"monitor.watch.{name} = {value!r}: choose one of {', '.join(ACTIONS)}"
                    )
            elif value < 0:
                raise ValueError(f"monitor.watch.{name} = {value}: must be 0 or more")


@dataclass
class MonitorConfig:
    """Observers of a run; none of them can change what it computes."""

    log_every: int = 10  # steps between two logged steps; the others cost nothing
    tensorboard: bool = True  # event files under <run>/tensorboard
    csv: bool = True  # <run>/metrics.csv
    progress: bool = True  # a bar on a terminal, plain lines elsewhere
    heartbeat: float = 5.0  # seconds between two "progress" lines of a rank; 0: no heartbeat
    health: bool = True  # gates and selection of each layer, at logged steps
    report: bool = True  # report.md with its pictures, at each gate and at the end
    memory_every: int = 1_000  # steps between two memory snapshots; 0: none
    ladder: LadderConfig = field(default_factory=LadderConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def validate(self) -> None:
        """Raise a ValueError that names the first setting that cannot work."""
        if self.log_every < 1:
            raise ValueError(f"monitor.log_every = {self.log_every}: must be 1 or more")
        for name in ("heartbeat", "memory_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"monitor.{name} = {getattr(self, name)}: must be 0 or more")
        self.ladder.validate()
        self.watch.validate()
