"""`nsa watch`: a watchdog outside the training process that reads heartbeats and ends hangs."""
