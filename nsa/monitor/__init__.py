"""Telemetry of a run: heartbeats, TensorBoard, CSV files, layer health, memory, stack dumps."""
