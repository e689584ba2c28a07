"""Those who watch a run: TensorBoard, tables, heartbeats, health, verdicts, reports, watchdog."""
