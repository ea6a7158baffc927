"""Engines: what turns prompt tokens into sampled tokens. One protocol, several implementations."""
