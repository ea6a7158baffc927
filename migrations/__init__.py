"""Alembic migrations: they only add first and remove later."""
