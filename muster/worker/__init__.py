"""Composition roots of the worker processes: settings in, clients built once, SIGTERM drains."""
