"""The embedded stack: Temporal, PostgreSQL, the inference service and the workers as children.

`muster up` runs one supervisor per data directory (`supervisor`). Each part (`temporal`,
`postgres`, `worker`) says how it is started, when it is healthy and how it is stopped; `process`
starts it so that it cannot outlive the supervisor; `state` is what other commands see of it.
"""
