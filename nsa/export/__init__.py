"""A run in the form that other tools read, and theirs as a run."""
