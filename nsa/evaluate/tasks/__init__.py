"""`nsa tasks`: synthetic recall tasks that only long-range attention solves."""
