"""`nsa plan`: memory, traffic and time of a run, estimated from counts."""
