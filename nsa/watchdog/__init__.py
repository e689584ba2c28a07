"""The watchdog, `nsa watch`: outside the process, with what the run writes down as its eyes."""
