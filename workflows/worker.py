"""What a worker needs to run these workflows: list, interceptors, failure types and sandbox."""

from __future__ import annotations

from typing import TypedDict

from pydantic import ValidationError
from temporalio.worker import Interceptor, WorkflowRunner
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from contracts.error import MusterError
from workflows.agent import AgentWorkflow
from workflows.plan import PlanWorkflow
from workflows.remote import IdempotencyKeys

WORKFLOWS: list[type] = [AgentWorkflow, PlanWorkflow]

INTERCEPTORS: list[Interceptor] = [IdempotencyKeys()]

FAILURE_TYPES: list[type[BaseException]] = [MusterError, ValidationError]
"""`workflow_failure_exception_types`: bad input fails the job; a bug keeps its task retrying."""

PASSTHROUGH = (
    "annotated_types",
    "contracts",
    "pydantic",
    "pydantic_core",
    "typing_extensions",
    "workflows.approval",
    "workflows.decision",
    "workflows.failure",
    "workflows.hold",
    "workflows.job",
    "workflows.limit",
    "workflows.offer",
    "workflows.option",
    "workflows.plan_agent",
    "workflows.plan_check",
    "workflows.plan_graph",
    "workflows.plan_live",
    "workflows.plan_node",
    "workflows.plan_place",
    "workflows.plan_progress",
    "workflows.plan_state",
    "workflows.plan_text",
    "workflows.plan_type",
    "workflows.reference",
    "workflows.remote",
    "workflows.schema",
    "workflows.state",
    "workflows.stepping",
    "workflows.text",
    "workflows.calling",
    "workflows.turn",
)
"""Imported once for all jobs: they hold no state, and pydantic classes are slow to build."""


class WorkflowOptions(TypedDict):
    """Keyword arguments that `Worker` and `Replayer` share."""

    workflows: list[type]
    workflow_runner: WorkflowRunner
    interceptors: list[Interceptor]
    workflow_failure_exception_types: list[type[BaseException]]


def workflow_options(runner: WorkflowRunner | None = None) -> WorkflowOptions:
    """Return what whoever runs or replays our workflows gives; `runner` is ours by default."""
    return WorkflowOptions(
        workflows=WORKFLOWS,
        workflow_runner=runner or workflow_runner(),
        interceptors=INTERCEPTORS,
        workflow_failure_exception_types=FAILURE_TYPES,
    )


def workflow_runner() -> SandboxedWorkflowRunner:
    """Return the sandbox that all of our workflows run in."""
    return SandboxedWorkflowRunner(
        restrictions=SandboxRestrictions.default.with_passthrough_modules(*PASSTHROUGH)
    )
