"""Jobs with a known split of their time, written by hand, and what is shown of them."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType
from temporalio.api.common.v1 import Payload
from temporalio.api.enums.v1 import EventType
from temporalio.api.history.v1 import HistoryEvent

from contracts.agent import AgentSpec
from contracts.job import AgentJobInput, AgentJobResult, StopReason
from contracts.llm_step import LLMStepInput, StepTiming, Usage
from contracts.message import ContextRef, Message, Role
from contracts.name import LLM_STEP, SEARCH_WAITING_FOR
from muster.account import Account
from muster.advice import bound_shares
from muster.projection import fold
from muster.time_report import JobTimes, PeriodTimes, job_times, period_times
from store.database import Database
from store.projection import ProjectedJob, put_projection
from store.summary import Which, read_summary
from tests.cli.past import EPOCH_NS, JOB_ID, Past, call_result, payloads, step_result
from tests.cli.test_report import TIMING, report_at

PRICE = 2.5
"""Of a GPU hour."""


def waits_for(past: Past, at_s: float, *values: str) -> None:
    """Let a job tell what it waits for, as its workflow does."""
    event = HistoryEvent(event_id=len(past.events) + 1)
    event.event_type = EventType.EVENT_TYPE_UPSERT_WORKFLOW_SEARCH_ATTRIBUTES
    event.event_time.FromNanoseconds(EPOCH_NS + round(at_s * 1e9))
    attributes = event.upsert_workflow_search_attributes_event_attributes.search_attributes
    listed = ", ".join(f'"{value}"' for value in values)
    attributes.indexed_fields[SEARCH_WAITING_FOR].CopyFrom(Payload(data=f"[{listed}]".encode()))
    past.events.append(event)


def times_of(*runs: Past, now_s: float = 99.0, price: float = 0.0) -> JobTimes:
    """Return the report of a job."""
    return job_times(report_at(now_s, *runs), price)


def job_of(step_s: StepTiming, tool_s: float, *, orchestration_s: float = 0.0) -> Past:
    """Return a job of one tool call between two LLM steps."""
    past, at_s = Past(), 0.1
    for calls in (True, False):
        step = past.step(at_s)
        past.start(step, at_s)
        at_s += step_s.total_s + orchestration_s
        past.complete(step, step_result(step_s), at_s)
        if calls:
            call = past.call(at_s)
            past.start(call, at_s)
            at_s += tool_s
            past.complete(call, call_result(tool_s), at_s)
    past.answer("done", at_s + 0.1)
    return past


def text_of(view: RenderableType) -> str:
    """Return what a terminal shows."""
    console = Console(width=160)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def follow_up(
    past: Past, at_s: float, base: str | None, usage: Usage, timing: StepTiming = TIMING
) -> None:
    """Let a job take a step that goes on from the conversation of the step `base`."""
    number = sum(
        event.HasField("activity_task_scheduled_event_attributes") for event in past.events
    )
    step_id = f"{JOB_ID}/0/{number + 1}"
    asked = LLMStepInput(
        step_id=step_id,
        job_id=JOB_ID,
        model="tiny",
        base=ContextRef(head="head", token_run=base),
        append=(Message(role=Role.USER, content="hi"),),
    )
    step = past.schedule(LLM_STEP, asked, at_s)
    past.start(step, at_s)
    result = step_result(timing).model_copy(update={"step_id": step_id, "usage": usage})
    past.complete(step, result, at_s + 1.0)


def used(prompt: int, cached: int, completion: int = 10, wasted: int = 0) -> Usage:
    """Return the tokens of a step."""
    return Usage(
        prompt_tokens=prompt,
        cached_tokens=cached,
        completion_tokens=completion,
        wasted_tokens=wasted,
    )


def sub_agent_job() -> Past:
    """Return a job that asks a sub-agent for 4 s, and a tool for 1 s of these."""
    past = Past()
    step = past.step(0.0)
    past.start(step, 0.0)
    past.complete(step, step_result(StepTiming(decode_s=1.0)), 1.0)
    event = HistoryEvent(event_id=len(past.events) + 1)
    event.event_type = EventType.EVENT_TYPE_START_CHILD_WORKFLOW_EXECUTION_INITIATED
    event.event_time.FromNanoseconds(EPOCH_NS + 10**9)
    asked = event.start_child_workflow_execution_initiated_event_attributes
    asked.workflow_id, asked.workflow_type.name = f"{JOB_ID}-sub", "AgentWorkflow"
    spec = AgentSpec(name="tailor", instructions="Sew.")
    asked.input.CopyFrom(payloads(AgentJobInput(agent=spec, input="a coat", model="tiny")))
    past.events.append(event)
    call = past.call(2.0)
    past.start(call, 2.0)
    past.complete(call, call_result(1.0), 3.0)
    event = HistoryEvent(event_id=len(past.events) + 1)
    event.event_type = EventType.EVENT_TYPE_CHILD_WORKFLOW_EXECUTION_COMPLETED
    event.event_time.FromNanoseconds(EPOCH_NS + 5 * 10**9)
    done = event.child_workflow_execution_completed_event_attributes
    done.initiated_event_id = asked_id = past.events[-4].event_id
    assert past.events[asked_id - 1].event_id == asked_id
    result = AgentJobResult(
        answer="sewn", stop_reason=StopReason.ANSWERED, turns=1, llm_steps=1, tool_calls=0,
        usage=Usage(prompt_tokens=1_000, completion_tokens=100),
    )  # fmt: skip
    done.result.CopyFrom(payloads(result))
    past.events.append(event)
    past.answer("worn", 5.0)
    return past


def check_times(times: JobTimes) -> None:
    """Check what holds for every job: no negative part, and turns that sum to the whole."""
    split = times.account.split
    assert all(value >= 0 for value in split.model_dump().values())
    beside_s = split.people_s + split.other_s
    turns_s = sum(turn.split.total_s for turn in times.turns)
    assert split.total_s == pytest.approx(turns_s + beside_s, rel=0.01)
    if split.other_s > 0:
        assert split.total_s == pytest.approx(times.account.wall_s, rel=0.01)
    assert sum(bound_shares(split).values()) == pytest.approx(1.0 if split.total_s else 0.0)
    tokens = times.account.tokens
    assert tokens.cached <= tokens.attainable


async def sums_of(database: Database, which: Which) -> PeriodTimes:
    """Return the report of the jobs in the database that are asked for."""
    summary = await database.transact(lambda connection: read_summary(connection, which))
    return period_times(summary, which, PRICE, None)


async def put_rows(database: Database, job_id: str, runs: list[list[HistoryEvent]]) -> ProjectedJob:
    """Write the rows of a job of these runs."""
    job, turns, calls = fold(job_id, runs, {})
    await database.transact(lambda connection: put_projection(connection, job, turns, calls))
    return job


def check_same(one: Account, other: Account) -> None:
    """Check that two accounts are the same to the last digit that a sum keeps."""
    mine, theirs = one.model_dump(), other.model_dump()
    for part in ("split", "tokens", "cost"):
        assert mine.pop(part) == pytest.approx(theirs.pop(part)), part
    tools = zip(mine.pop("tools"), theirs.pop("tools"), strict=True)
    assert all(tool == pytest.approx(same) for tool, same in tools)
    assert mine == pytest.approx(theirs)
