"""Plans on a stage: start them, and models that answer by the prompt."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from uuid import uuid4

from pydantic_core import to_json
from temporalio.exceptions import ApplicationError

from contracts.job import AgentJobResult
from contracts.llm_step import LLMStepInput, LLMStepResult
from contracts.message import Message, Role
from contracts.name import AGENTS_QUEUE, PLAN_QUERY, PLAN_WORKFLOW
from contracts.plan import Plan
from contracts.plan_job import PlanProgress
from contracts.tool import CallToolInput, CallToolResult
from tests.workflows.peer import Script, Tool, answered, finished
from tests.workflows.stage import MODEL, JobHandle, Stage, within
from workflows.plan_state import BodyState, PlanRunInput

Model = Callable[[LLMStepInput], Awaitable[LLMStepResult]]
MAX_STEPS = 2_000

TOOLS = [{"function": "shop.tools:search"}, {"function": "shop.tools:read"}]


def plan(nodes: Mapping[str, Any], **fields: Any) -> Plan:
    """A plan with two tools."""
    return Plan.model_validate({"name": "trip", "tools": TOOLS, "nodes": nodes} | fields)


def tells(answers: Mapping[str, str]) -> Model:
    """A model that answers a prompt, which it must know, in the words given."""

    async def reply(step: LLMStepInput) -> LLMStepResult:
        prompt = step.append[-1].content
        if prompt not in answers:
            raise ApplicationError(f"nobody asks {prompt!r}", non_retryable=True)
        return finished(step, Message(role=Role.ASSISTANT, content=answers[prompt]))

    return reply


async def echoes(step: LLMStepInput) -> LLMStepResult:
    """A model that says what it was asked, in brackets."""
    said = f"<{step.append[-1].content}>"
    return finished(step, Message(role=Role.ASSISTANT, content=said))


async def shows(call: CallToolInput) -> CallToolResult:
    """A tool that returns its arguments, as JSON."""
    return answered(call, to_json(call.call.arguments).decode())


async def start_plan(
    stage: Stage,
    whole: Plan,
    given: Mapping[str, Any] | None = None,
    *,
    model: Model = echoes,
    tools: Mapping[str, Tool] | None = None,
    retried: BodyState | None = None,
    **script: Any,
) -> tuple[JobHandle, Script]:
    """Start a job of a plan."""
    job_id = f"job-{uuid4()}"
    known = {"search": shows, "read": shows, **(tools or {})}
    kept = stage.peer.scripts[job_id] = Script((model,) * MAX_STEPS, tools=known, **script)
    job = PlanRunInput(plan=whole, input=dict(given or {}), model=MODEL, retried=retried)
    handle: JobHandle = await stage.client.start_workflow(
        PLAN_WORKFLOW, job, id=job_id, task_queue=AGENTS_QUEUE, result_type=AgentJobResult
    )
    stage.handles.append(handle)
    return handle, kept


async def run_plan(
    stage: Stage, whole: Plan, given: Mapping[str, Any] | None = None, **how: Any
) -> tuple[AgentJobResult, Script]:
    """Run a plan to its end."""
    handle, script = await start_plan(stage, whole, given, **how)
    return await within(handle.result()), script


async def look(handle: JobHandle) -> PlanProgress:
    """Ask how the nodes of a plan stand."""
    found: PlanProgress = await handle.query(PLAN_QUERY, result_type=PlanProgress)
    return found
