"""The stage of the workflow tests, for plans."""

from __future__ import annotations

from tests.workflows.conftest import (
    rolling_client,
    rolling_stage,
    skipping_client,
    skipping_stage,
    stage,
)

__all__ = ["rolling_client", "rolling_stage", "skipping_client", "skipping_stage", "stage"]
