"""Settings of telemetry, go/no-go gates and the watchdog: `monitor`, its `ladder` and `watch`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from nsa.validation import at_least, one_of

ACTIONS = ("ignore", "warn", "halt")


@dataclass
class LadderConfig:
    """Steps of the go/no-go gates, and limits of their criteria; 0 switches a criterion off."""

    sanity: int = 1  # step of the go/no-go gate `sanity`
    smoke: int = 300  # step of the go/no-go gate `smoke`; the loss must have fallen
    extended: int = 1_000  # step of the go/no-go gate `extended`; peak memory must be steady
    min_tokens_per_s: float = 50.0  # median since the previous go/no-go gate, all ranks
    max_memory_gb: float = 60.0  # peak memory of any rank
    max_memory_growth: float = 0.05  # growth of peak memory in the run's second half, a fraction
    max_step_spread: float = 2.0  # p90 / median step time
    max_pause: float = 120.0  # seconds without a step, outside evaluation and saving
    min_gpu_busy: float = 0.8  # mean GPU utilization of each rank, 0 to 1
    max_gpu_imbalance: float = 0.1  # max - min GPU utilization over ranks
    max_skipped: float = 0.01  # fraction of the steps that were skipped
    min_gate: float = 0.01  # mean attention gate of each branch
    # attention that selected blocks hold over that of random ones, in the best layer; from
    # `extended` on, with the selector loss
    min_recall: float = 1.05
    require_fall: bool = True  # from `smoke` on, the loss must end below where it began

    def validate(self) -> None:
        at_least(0, "monitor.ladder", self, *asdict(self))
        if not 0 < self.sanity < self.smoke < self.extended:
            raise ValueError(
                f"monitor.ladder: sanity = {self.sanity}, smoke = {self.smoke}, extended = "
                f"{self.extended}: each must be above the one before, the first above 0"
            )


@dataclass
class WatchConfig:
    """Limits of `nsa watch` for hangs and unhealthy runs; seconds, 0 switches a limit off."""

    setup: float = 1_800.0  # seconds from the start to the first step, including compilation
    data: float = 900.0  # seconds waiting for a batch; set it above data.timeout
    compute: float = 600.0  # seconds in one forward, backward or optimizer step
    evaluation: float = 1_800.0  # seconds in one evaluation
    save: float = 1_800.0  # seconds for one checkpoint
    silence: float = 60.0  # seconds without a heartbeat from a live rank
    grace: float = 30.0  # seconds between SIGTERM and SIGKILL
    collapse: float = 0.2  # tokens/s below this fraction of the run's median for ten logged steps
    on_collapse: str = "warn"  # at a throughput collapse: ignore, warn or halt
    dead_gate: float = 0.001  # mean attention gate of a branch below this for ten logged steps
    on_dead_gate: str = "warn"  # at a dead attention gate: ignore, warn or halt

    def validate(self) -> None:
        limits = [name for name in asdict(self) if not name.startswith("on_")]
        at_least(0, "monitor.watch", self, *limits)
        one_of("monitor.watch", self, on_collapse=ACTIONS, on_dead_gate=ACTIONS)


@dataclass
class MonitorConfig:
    """Outputs of a run; none changes what it computes."""

    log_every: int = 10  # steps between rows of metrics.csv and TensorBoard points
    tensorboard: bool = True  # event files under <run>/tensorboard
    csv: bool = True  # <run>/metrics.csv
    progress: bool = True  # lines on the console: loss, speed, remaining time
    heartbeat: float = 5.0  # seconds between heartbeats of a rank; 0: none
    kernel_check: bool = True  # on a GPU: compare each kernel with PyTorch before step 1
    health: bool = True  # attention gates and block selection of each layer, at logged steps
    report: bool = True  # report.md with plots, at each go/no-go gate and at the end
    memory_every: int = 1_000  # steps between two memory snapshots; 0: none
    ladder: LadderConfig = field(default_factory=LadderConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def validate(self) -> None:
        at_least(1, "monitor", self, "log_every")
        at_least(0, "monitor", self, "heartbeat", "memory_every")
        self.ladder.validate()
        self.watch.validate()
