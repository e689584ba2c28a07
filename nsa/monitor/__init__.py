"""Those who watch a run: TensorBoard, metrics.csv, the console, gates, speed; verdicts and reports."""
