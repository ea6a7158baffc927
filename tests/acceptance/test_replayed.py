"""Case J10: a job that is replayed at every task is counted, traced and logged once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import sqlalchemy as sa
import yaml
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from store.schema import step_ledger
from tests.acceptance.conftest import Stage, payer, running_stack
from tests.stack.collector import collecting

pytestmark = pytest.mark.timeout(300)

STEPS, CALLS = 4, 3


@dataclass
class Traced:
    """A job that has ended, on a stack that has been taken down: all its spans are sent."""

    report: dict[str, object]
    tokens: dict[str, int]
    spans: list[Span]
    log: str


@pytest_asyncio.fixture(scope="module")
async def traced(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Traced]:
    """Run one job with tools from the shell, where no worker keeps any workflow in memory."""
    directory = tmp_path_factory.mktemp("stack")
    agent = directory / "payer.yaml"
    agent.write_text(yaml.safe_dump(payer().model_dump(mode="json", exclude_defaults=True)))
    with collecting() as collector:
        async with running_stack(
            directory,
            MUSTER_MAX_CACHED_WORKFLOWS="0",
            MUSTER_SIMULATED_TIME_SCALE="0",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        ) as stage:
            done = await asyncio.to_thread(stage.muster.run, "run", str(agent), "Pay.", "--json")
            assert done.returncode == 0, done.stdout + done.stderr
            report = json.loads(done.stdout)
            tokens = await ledger_tokens(stage)
            await asyncio.to_thread(stage.muster.run, "down")
            log = (stage.muster.data_dir / "log" / "agents.log").read_text()
        yield Traced(report, tokens, collector.spans, log)


async def ledger_tokens(stage: Stage) -> dict[str, int]:
    """Return the sums over all attempts on record."""
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "wasted_tokens")
    sums = [sa.func.sum(step_ledger.c[name]).label(name) for name in names]
    rows = await stage.database.fetch(sa.select(*sums), {})
    return {name: int(getattr(rows[0], name)) for name in names}


def test_tokens_are_counted_once(traced: Traced) -> None:
    usage = traced.report["usage"]
    assert isinstance(usage, dict)
    assert {name: usage.get(name, 0) for name in traced.tokens} == traced.tokens
    assert traced.tokens["completion_tokens"] > 0
    assert (traced.report["llm_steps"], traced.report["tool_calls"]) == (STEPS, CALLS)


def test_each_span_is_recorded_once(traced: Traced) -> None:
    assert Counter(span.name for span in traced.spans if is_of_the_job(span)) == {
        "StartWorkflow:AgentWorkflow": 1,
        "RunWorkflow:AgentWorkflow": 1,
        "StartActivity:open_job": 1,
        "RunActivity:open_job": 1,
        "StartActivity:llm_step": STEPS,
        "RunActivity:llm_step": STEPS,
        "StartActivity:call_tool": CALLS,
        "RunActivity:call_tool": CALLS,
        "text_completion smollm2": STEPS,
    }


def test_spans_reach_from_the_client_to_the_engine_in_one_tree(traced: Traced) -> None:
    spans = {span.span_id: span for span in traced.spans}
    engine = [span for span in traced.spans if span.name == "text_completion smollm2"]
    assert len(engine) == STEPS
    for span in engine:
        path = [span.name]
        while span.parent_span_id:
            span = spans[span.parent_span_id]
            path.append(span.name)
        assert path == [
            "text_completion smollm2",
            "RunActivity:llm_step",
            "StartActivity:llm_step",
            "RunWorkflow:AgentWorkflow",
            "StartWorkflow:AgentWorkflow",
        ]
    assert len({span.trace_id for span in traced.spans if is_of_the_job(span)}) == 1


def test_no_log_line_is_written_twice(traced: Traced) -> None:
    lines = [line.partition(" ")[2] for line in traced.log.splitlines()]
    assert [line for line, count in Counter(lines).items() if count > 1] == []


def is_of_the_job(span: Span) -> bool:
    """Tell whether a span belongs to a job, and not to what a process asks the server itself."""
    return span.name.startswith(("Start", "Run", "text_completion"))
