"""Those who watch a run: TensorBoard, metrics.csv, the console, gates, speed, and the plots."""
