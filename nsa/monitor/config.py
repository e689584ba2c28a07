"""Settings of telemetry, go/no-go gates and the watchdog: `monitor`, its `ladder` and `watch`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from nsa.validation import at_least, one_of

HEARTBEAT_SECONDS = 5.0  # between two heartbeats of a rank


@dataclass
class LadderConfig:
    """Steps of the go/no-go gates, and limits of their criteria; 0 switches a limit off."""

    smoke: int = 300  # step of the go/no-go gate `smoke`; the loss must have fallen
    extended: int = 1_000  # step of the go/no-go gate `extended`; peak memory must be steady
    min_tokens_per_s: float = 50.0  # median of the logged steps, all ranks
    max_memory_gb: float = 60.0  # peak memory of any rank
    # attention on selected blocks divided by attention on random ones, in the best layer; from
    # `extended` on, with the selector loss
    min_recall: float = 1.05

    def validate(self) -> None:
        at_least(0, "monitor.ladder", self, *asdict(self))
        if not 1 < self.smoke < self.extended:
            raise ValueError(
                f"monitor.ladder: smoke = {self.smoke}, extended = {self.extended}: each must be "
                "above the one before, the first above 1"
            )


@dataclass
class WatchConfig:
    """Limits of `nsa watch`; 0 switches one off."""

    setup: float = 1_800.0  # seconds from the start to the first step, including compilation
    compute: float = 600.0  # seconds in a step's wait for data, forward, backward or update
    save: float = 1_800.0  # seconds for one checkpoint or evaluation
    silence: float = 60.0  # seconds without a heartbeat from a live rank
    on_collapse: str = "warn"  # 10 rows below a fifth of the median tokens/s: ignore, warn or halt

    def validate(self) -> None:
        at_least(0, "monitor.watch", self, "setup", "compute", "save", "silence")
        one_of("monitor.watch", self, on_collapse=("ignore", "warn", "halt"))


@dataclass
class MonitorConfig:
    """Outputs of a run; none changes what it computes."""

    log_every: int = 10  # steps between rows of metrics.csv and TensorBoard points
    tensorboard: bool = True  # event files under <run>/tensorboard
    csv: bool = True  # <run>/metrics.csv, which gates, the watchdog and reports read
    health: bool = True  # attention gates and block selection of each layer, at logged steps
    memory_every: int = 1_000  # steps between two memory snapshots; 0: none
    ladder: LadderConfig = field(default_factory=LadderConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def validate(self) -> None:
        at_least(1, "monitor", self, "log_every")
        at_least(0, "monitor", self, "memory_every")
        self.ladder.validate()
        self.watch.validate()
