"""The ready-cohort scheduler: a state machine without clock, socket or await."""
