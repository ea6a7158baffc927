"""Deterministic Temporal workflows, and the pure parts they decide with.

Pure (no temporalio, asyncio, time or random): `state`, `limit`, `offer`, `turn`, `text`.
"""
