"""Everything with a side effect that a workflow asks for: opening a job, calling its tools."""
