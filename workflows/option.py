"""How each activity is scheduled: its queue, timeouts, retries, priority and cancellation."""

from __future__ import annotations

from datetime import timedelta
from typing import TypedDict

from temporalio.common import (
    Priority,
    RetryPolicy,
    SearchAttributeKey,
    SearchAttributePair,
    TypedSearchAttributes,
    WorkflowIDReusePolicy,
)
from temporalio.workflow import (
    ActivityCancellationType,
    ChildWorkflowCancellationType,
    ParentClosePolicy,
)

from contracts.agent import AgentSpec, ToolPolicy
from contracts.job import AgentJobInput, JobStatus
from contracts.name import (
    SEARCH_AGENT,
    SEARCH_STATE,
    SEARCH_TENANT,
    TOOLS_QUEUE,
    continue_queue,
    start_queue,
    tool_queue,
)
from contracts.tool_source import RemoteActivity

_AGENT = SearchAttributeKey.for_keyword(SEARCH_AGENT)
_TENANT = SearchAttributeKey.for_keyword(SEARCH_TENANT)
_STATE = SearchAttributeKey.for_keyword(SEARCH_STATE)

TIMEOUT_GRACE = timedelta(hours=1)
"""A job stops itself at its wall-time limit; the server ends it this much later if it did not."""

OPEN_JOB_TIMEOUT = timedelta(minutes=10)
"""Schedule to close of `open_job`: a tool worker that is away longer fails the job."""

OPEN_JOB_ATTEMPT_TIMEOUT = timedelta(seconds=30)
"""Start to close of one attempt of `open_job`: it stores a few rows. Servers' tools are asked for
one after the other, each within its own time, which comes on top."""

HEARTBEAT_TIMEOUT = timedelta(seconds=30)
"""Liveness of long activities; they heartbeat from their sixth second on."""

TOOL_GRACE = timedelta(seconds=10)
"""The tool worker ends a call at the tool's own timeout, since it can say what happened; Temporal's
comes this much later, for a worker that could not."""

SESSION_HINT_TIMEOUT = timedelta(seconds=2)
"""A hint is worth little: a service that does not take it at once does without."""

CHECK_APPROVAL_TIMEOUT = timedelta(minutes=10)
"""Schedule to close of `check_approval`: where no tool worker is for so long, people decide."""

CHECK_APPROVAL_ATTEMPT_TIMEOUT = timedelta(seconds=30)
"""Start to close of one attempt of `check_approval`: it waits for nothing."""

CHECK_APPROVAL_ATTEMPTS = 5
"""Attempts at a rule, for workers that are lost."""

KEEP_RESULT_TIMEOUT = timedelta(minutes=10)
"""Schedule to close of `keep_result`: the call has been made, so its result is worth a wait."""

KEEP_RESULT_ATTEMPT_TIMEOUT = timedelta(seconds=30)
"""Start to close of one attempt of `keep_result`: it stores one row."""

KEEP_RESULT_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10)
)
"""Bounded by the time above."""

LLM_STEP_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10)
)
"""Attempts are bounded by the job's wall time only: a process killed five times fails no job."""

OPEN_JOB_RETRY = RetryPolicy(
    initial_interval=timedelta(seconds=1), maximum_interval=timedelta(seconds=10)
)


class ActivityOptions(TypedDict, total=False):
    """Keyword arguments of `workflow.start_activity`."""

    task_queue: str
    schedule_to_close_timeout: timedelta
    schedule_to_start_timeout: timedelta
    start_to_close_timeout: timedelta
    heartbeat_timeout: timedelta
    retry_policy: RetryPolicy
    cancellation_type: ActivityCancellationType
    priority: Priority


def priority(job: AgentJobInput) -> Priority:
    """Return the priority of everything a job asks for, fair between tenants."""
    return Priority(priority_key=job.priority, fairness_key=job.tenant)


def open_job_options(
    job: AgentJobInput, remaining: timedelta, agent: AgentSpec | None = None
) -> ActivityOptions:
    """Return the options of `open_job`; `remaining` is the job's wall time that is left.

    `agent` has the tools that are opened, if they are not those of the job's own.
    """
    longest = min(OPEN_JOB_TIMEOUT, remaining)
    attempt = OPEN_JOB_ATTEMPT_TIMEOUT
    for tool in (agent or job.agent).tools:
        attempt += min(tool.mcp.list_timeout, longest) if tool.mcp else timedelta(0)
    return ActivityOptions(
        task_queue=TOOLS_QUEUE,
        schedule_to_close_timeout=longest,
        start_to_close_timeout=min(attempt, max(longest, OPEN_JOB_ATTEMPT_TIMEOUT)),
        retry_policy=OPEN_JOB_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        priority=priority(job),
    )


def check_approval_options(job: AgentJobInput, remaining: timedelta) -> ActivityOptions:
    """Return the options of `check_approval`; `remaining` is the job's wall time that is left."""
    return ActivityOptions(
        task_queue=TOOLS_QUEUE,
        schedule_to_close_timeout=min(CHECK_APPROVAL_TIMEOUT, remaining),
        start_to_close_timeout=CHECK_APPROVAL_ATTEMPT_TIMEOUT,
        retry_policy=RetryPolicy(maximum_attempts=CHECK_APPROVAL_ATTEMPTS),
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        priority=priority(job),
    )


def keep_result_options(job: AgentJobInput, remaining: timedelta) -> ActivityOptions:
    """Return the options of `keep_result`; `remaining` is the job's wall time that is left."""
    return ActivityOptions(
        task_queue=TOOLS_QUEUE,
        schedule_to_close_timeout=min(KEEP_RESULT_TIMEOUT, remaining),
        start_to_close_timeout=KEEP_RESULT_ATTEMPT_TIMEOUT,
        retry_policy=KEEP_RESULT_RETRY,
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        priority=priority(job),
    )


def llm_step_options(
    job: AgentJobInput, remaining: timedelta, *, is_first: bool
) -> ActivityOptions:
    """Return the options of an LLM step; the first of a session waits for room, others do not."""
    return ActivityOptions(
        task_queue=start_queue(job.model) if is_first else continue_queue(job.model),
        schedule_to_close_timeout=remaining,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=LLM_STEP_RETRY,
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        priority=priority(job),
    )


class ChildOptions(TypedDict, total=False):
    """Keyword arguments of `workflow.execute_child_workflow`."""

    execution_timeout: timedelta
    cancellation_type: ChildWorkflowCancellationType
    parent_close_policy: ParentClosePolicy
    id_reuse_policy: WorkflowIDReusePolicy
    priority: Priority
    search_attributes: TypedSearchAttributes


def sub_agent_options(job: AgentJobInput) -> ChildOptions:
    """Return the options of a sub-agent's job; `job` is the sub-agent's."""
    return ChildOptions(
        execution_timeout=job.agent.limits.max_wall_time + TIMEOUT_GRACE,
        cancellation_type=ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
        parent_close_policy=ParentClosePolicy.REQUEST_CANCEL,
        id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
        priority=priority(job),
        search_attributes=search_attributes(job),
    )


def search_attributes(job: AgentJobInput) -> TypedSearchAttributes:
    """Return what a job that starts can be found by."""
    return TypedSearchAttributes(
        [
            SearchAttributePair(_AGENT, job.agent.name),
            SearchAttributePair(_TENANT, job.tenant),
            SearchAttributePair(_STATE, JobStatus.RUNNING.value),
        ]
    )


def session_hint_options(job: AgentJobInput) -> ActivityOptions:
    """Return the options of `session_hint`: one attempt, on the queue that is always polled."""
    return ActivityOptions(
        task_queue=continue_queue(job.model),
        schedule_to_close_timeout=SESSION_HINT_TIMEOUT,
        start_to_close_timeout=SESSION_HINT_TIMEOUT,
        retry_policy=RetryPolicy(maximum_attempts=1),
        cancellation_type=ActivityCancellationType.TRY_CANCEL,
        priority=priority(job),
    )


def call_tool_options(
    job: AgentJobInput, tool: ToolPolicy, remaining: timedelta
) -> ActivityOptions:
    """Return the options of a tool call, from its policy."""
    return ActivityOptions(
        task_queue=tool_queue(tool.group),
        schedule_to_close_timeout=remaining,
        schedule_to_start_timeout=tool.queue_timeout,
        start_to_close_timeout=tool.timeout + TOOL_GRACE,
        heartbeat_timeout=HEARTBEAT_TIMEOUT,
        retry_policy=_retry(tool),
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        priority=priority(job),
    )


def remote_options(
    job: AgentJobInput, tool: ToolPolicy, remote: RemoteActivity, remaining: timedelta
) -> ActivityOptions:
    """Return the options of a call that another worker runs; whether it heartbeats is its own."""
    options = ActivityOptions(
        task_queue=remote.queue,
        schedule_to_close_timeout=remaining,
        schedule_to_start_timeout=tool.queue_timeout,
        start_to_close_timeout=tool.timeout,
        retry_policy=_retry(tool),
        cancellation_type=ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
        priority=priority(job),
    )
    if remote.heartbeat:
        options["heartbeat_timeout"] = remote.heartbeat
    else:  # one that does not heartbeat never learns that it is cancelled
        options["cancellation_type"] = ActivityCancellationType.TRY_CANCEL
    return options


def _retry(tool: ToolPolicy) -> RetryPolicy:
    return RetryPolicy(
        initial_interval=tool.retry.initial_interval,
        backoff_coefficient=tool.retry.backoff,
        maximum_interval=max(tool.retry.max_interval, tool.retry.initial_interval),
        maximum_attempts=tool.retry.max_attempts,
    )
