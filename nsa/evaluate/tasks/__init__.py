"""Tasks that small models learn in minutes, and that only attention to what is far solves."""
