"""A fresh model name for each test of the service on Temporal."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from temporalio.client import Client
from temporalio.worker import Worker

from tests.inference_service.one_step import OneStep


@pytest.fixture
async def model(temporal_client: Client) -> AsyncIterator[str]:
    """Return a fresh model name, so fresh task queues, with a worker for `OneStep`."""
    name = f"m-{uuid4().hex[:12]}"
    async with Worker(temporal_client, task_queue=name, workflows=[OneStep]):
        yield name
