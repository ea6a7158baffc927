"""The work of a plan's nodes: LLM steps, tool calls, agents' jobs, questions to people.

A node's attempt returns its value, or `None` in place of it if it is left to the next run. What
ends an attempt is retried as the node says; a reference that leads nowhere is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from pydantic import JsonValue
from pydantic_core import from_json, to_json
from temporalio import workflow
from temporalio.exceptions import ActivityError, ApplicationError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.agent import OnFailure, Sampling, SubAgent, ToolRef
    from contracts.approval import Approval, Verdict
    from contracts.job import AgentJobInput, StopReason
    from contracts.limit import (
        INLINE_RESULT_BYTES,
        MAX_APPEND_BYTES,
        MAX_ASSISTANT_BYTES,
        MAX_INPUT_BYTES,
    )
    from contracts.llm_step import Hints, LLMStepInput, LLMStepResult, Outcome, OutputForm
    from contracts.message import Message, Role, ToolCall, content_hash
    from contracts.name import LLM_STEP, TASK
    from contracts.plan import AgentNode, ApprovalNode, LLMNode, Node, ToolNode, WorkNode
    from contracts.tool import ToolOutcome
    from workflows import failure, limit, option, text
    from workflows.calling import Caller
    from workflows.failure import LimitReachedError, OutOfTimeError
    from workflows.hold import Hold, Release
    from workflows.plan_progress import Progress
    from workflows.plan_state import NodePath, NodeState, PlanState, shown
    from workflows.reference import BadReferenceError
    from workflows.reference import shown as as_text
    from workflows.schema import misfit
    from workflows.state import ApprovalRequest, OpenCall

MAX_CALL_ID_CHARS = 250
"""Ids of calls are keys of tables and of decisions; a longer path stands in one as its hash."""

FIRST_RETRY = timedelta(seconds=1)
MAX_RETRY = timedelta(minutes=1)
"""Pause before a node is tried again: doubled each time, up to this."""

T = TypeVar("T")


class NodeFailedError(Exception):
    """An attempt at a node has failed; it never leaves the workflow."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a node gives, which may be null."""

    value: JsonValue


@dataclass(frozen=True, slots=True)
class Work:
    """A node that runs; its plan may have given it up meanwhile."""

    path: NodePath
    node: Node
    state: NodeState

    @property
    def name(self) -> str:
        """Its path, as people read it."""
        return shown(self.path)


class NodeRunner:
    """Does the work of nodes.

    `time_left` returns the plan's wall time that is left, or raises `OutOfTimeError`; nothing is
    scheduled once `is_rolling_over` says so. `tell` makes known what waits for people.
    """

    def __init__(
        self,
        job: AgentJobInput,
        state: PlanState,
        hold: Hold,
        progress: Progress,
        callables: Mapping[str, ToolRef | SubAgent],
        *,
        tell: Callable[[], None],
        time_left: Callable[[], timedelta],
        is_rolling_over: Callable[[], bool],
    ) -> None:
        self._job = job
        self._state = state
        self._hold = hold
        self._progress = progress
        self._callables = callables
        self._tell = tell
        self._time_left = time_left
        self._is_rolling_over = is_rolling_over
        self.is_stopping = False
        """Whether the job ends, so that what fails now has been cancelled."""

    async def run(self, path: NodePath) -> None:
        """Do a node's work and tell the plan's progress what became of it.

        Raises `LimitReachedError` if a limit of the plan forbids it.
        """
        self._hold.begin_part()
        try:
            await self._run(Work(path, self._progress.node(path), self._progress.state(path)))
        except (Exception, asyncio.CancelledError):  # a job dropped from memory counts nothing
            self._hold.end_part()
            raise
        self._hold.end_part()

    async def _run(self, work: Work) -> None:
        progress, path, node, state = self._progress, work.path, work.node, work.state
        state.began_at = state.began_at or workflow.now()
        while True:
            try:
                value = await self._attempt(work)
            except BadReferenceError as error:
                self.forget(path)
                return progress.fail(path, error.message)
            except (NodeFailedError, ApplicationError) as error:
                if self.is_stopping or not progress.has(path):
                    return None
                state.tries += 1
                why = error.message if isinstance(error, ApplicationError) else str(error)
                tries = node.retries if isinstance(node, WorkNode) else 0
                self.forget(path)
                if state.tries > tries:
                    return progress.fail(path, why)
                workflow.logger.info("node %s is tried again: %s", shown(path), why)
                if not await self._pause(work) or not progress.has(path):
                    return progress.hand_back(path)
            except OutOfTimeError:
                self._time_left()
                assert isinstance(node, WorkNode)
                assert node.timeout is not None
                took = f"{node.timeout.total_seconds():g} s"
                self.forget(path)
                return progress.fail(path, f"it took longer than its timeout of {took}")
            else:
                if value is None:
                    return progress.hand_back(path)
                self.forget(path)
                return progress.finish(path, value.value)

    async def _pause(self, work: Work) -> bool:
        """Wait before the next attempt; False if that is left to the next run."""
        wait = min(MAX_RETRY, FIRST_RETRY * 2 ** (work.state.tries - 1))
        with suppress(asyncio.TimeoutError):
            await workflow.wait_condition(
                self._is_rolling_over,
                timeout=wait,
                timeout_summary=text.summary(f"before {work.name} is tried again"),
            )
        return await self._hold.unpaused() and not self._is_rolling_over()

    async def _attempt(self, work: Work) -> Value | None:
        match work.node:
            case LLMNode() as node:
                return await self._llm(work, node)
            case ToolNode() as node:
                return await self._tool(work, node)
            case AgentNode() as node:
                return await self._agent(work, node)
            case ApprovalNode() as node:
                return await self._approval(work, node)
            case other:
                raise AssertionError(f"{other} does no work")

    def forget(self, path: NodePath) -> None:
        """Let go of the calls of a node whose attempt is over."""
        prefix, calls = _call_prefix(path), self._state.calls
        self._state.calls = [each for each in calls if not each.call.id.startswith(prefix)]
        if any(each.request for each in calls):
            self._tell()

    def _node_time_left(self, work: Work) -> timedelta:
        """Return the time that a node has left; raises `OutOfTimeError`."""
        left, node = self._time_left(), work.node
        if isinstance(node, WorkNode) and node.timeout is not None:
            began_at = work.state.began_at
            assert began_at is not None
            left = min(left, began_at + node.timeout - workflow.now())
        if left <= timedelta(0):
            raise OutOfTimeError
        return left

    def _check_limits(self, *, tool_calls: int = 0) -> None:
        limits = self._job.agent.limits
        if stop := limit.reached(limits, self._state):
            raise LimitReachedError(stop)
        if self._state.tool_calls + tool_calls > limits.max_tool_calls:
            raise LimitReachedError(StopReason.MAX_TOOL_CALLS)

    # An LLM step -----------------------------------------------------------------------------

    async def _llm(self, work: Work, node: LLMNode) -> Value:
        self._check_limits()
        prompt = self._filled(work, node.llm)
        messages = [Message(role=Role.USER, content=prompt)]
        if node.instructions:
            told = self._filled(work, node.instructions)
            messages.insert(0, Message(role=Role.SYSTEM, content=told))
        _at_most("its prompt", len(to_json(messages)), MAX_APPEND_BYTES)
        schema: dict[str, JsonValue] | None = node.output
        if node.choices:
            schema = {"enum": list(node.choices)}
        job = self._job.model_copy(update={"model": node.model or self._job.model})
        job_id = workflow.info().workflow_id
        step = LLMStepInput(
            step_id=self._state.take_step_id(job_id),
            job_id=job_id,
            model=job.model,
            base=None,
            append=tuple(messages),
            output=OutputForm(json_schema=schema),
            sampling=Sampling(max_tokens=node.max_tokens),
            hints=Hints(
                priority=job.priority,
                attained_s=self._state.attained_s,
                tenant=job.tenant,
                deadline=job.deadline,
            ),
        )
        result = await self._step(work, job, step)
        self._state.count_step(result)
        if result.outcome is not Outcome.FINISHED or result.message is None:
            raise failure.protocol_failure(step.step_id, f"outcome {result.outcome}")
        return Value(_parsed(result.message.content, "the model") if schema is not None
                     else result.message.content)  # fmt: skip

    async def _step(self, work: Work, job: AgentJobInput, step: LLMStepInput) -> LLMStepResult:
        left = self._node_time_left(work)
        try:
            result: LLMStepResult = await workflow.execute_activity(
                LLM_STEP,
                step,
                result_type=LLMStepResult,
                summary=text.summary(f"{work.name}: {step.append[-1].content}"),
                **option.llm_step_options(job, left, is_first=True),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            self._node_time_left(work)
            if failure.ran_out_of_time(error):
                raise OutOfTimeError from error
            raise failure.step_failure(step.step_id, error) from error
        return result

    # A call of a tool or an agent ------------------------------------------------------------

    async def _tool(self, work: Work, node: ToolNode) -> Value | None:
        arguments = self._progress.filled(work.path, node.arguments)
        assert isinstance(arguments, dict)
        _at_most("its arguments", len(to_json(arguments)), MAX_ASSISTANT_BYTES)
        tool = self._callables[node.tool]
        each = await self._call(work, node, tool, ToolCall(
            id=self._call_id(work), tool=node.tool, arguments=arguments
        ))  # fmt: skip
        if each.answer is None:
            return None
        if each.blob is not None:
            raise NodeFailedError(
                f"what {node.tool} returned has {each.blob.bytes:,} bytes, the limit on a value "
                f"of a plan is {INLINE_RESULT_BYTES:,} bytes"
            )
        if node.output is None:
            return Value(each.answer)
        value = _parsed(each.answer, node.tool)
        if problem := misfit(node.output, value, f"what {node.tool} returned"):
            raise NodeFailedError(problem)
        return Value(value)

    async def _agent(self, work: Work, node: AgentNode) -> Value | None:
        task = self._filled(work, node.task)
        _at_most("its task", len(task.encode()), MAX_INPUT_BYTES)
        agent = self._callables[node.agent]
        each = await self._call(work, node, agent, ToolCall(
            id=self._call_id(work), tool=node.agent, arguments={TASK: task}
        ))  # fmt: skip
        return None if each.answer is None else Value(each.answer)

    async def _call(
        self, work: Work, node: WorkNode, called: ToolRef | SubAgent, call: ToolCall
    ) -> OpenCall:
        """Make a call; raises `NodeFailedError` if its answer is an error."""
        self._check_limits(tool_calls=1)
        each = self._find_call(call.id)
        if each is None:
            each = OpenCall(call=call, policy=_policy(called, node))
            self._state.calls.append(each)
            self._state.count_call(call.tool)
        asked = sum(isinstance(other, AgentNode) for other in self._progress.running.values())
        caller = Caller(
            self._job,
            self._state,
            self._hold,
            tell=self._tell,
            time_left=lambda: self._node_time_left(work),
            is_rolling_over=self._is_rolling_over,
        )
        policy = {"on_failure": OnFailure.FAIL_JOB}
        if each.policy is not None:
            policy |= {"approval": each.policy}  # type: ignore[dict-item]
        await caller.make_one(each, called.model_copy(update=policy), max(1, asked))
        if each.outcome is ToolOutcome.ERROR:
            assert each.answer is not None
            raise NodeFailedError(each.answer.removeprefix("error: "))
        return each

    # A question to people --------------------------------------------------------------------

    async def _approval(self, work: Work, node: ApprovalNode) -> Value | None:
        each = self._find_call(self._call_id(work)) or self._ask(work, node)
        request = each.request
        assert request is not None
        release = await self._hold.wait(lambda: not each.is_waiting, expires_at=request.expires_at)
        if release is Release.ROLL_OVER:
            return None
        by, why = ", ".join(request.approved_by), ""
        if request.verdict is Verdict.DENY:
            by, why = request.denied_by, request.reason
        elif request.verdict is None:
            assert node.expires is not None
            why = f"nobody has approved it within {node.expires.total_seconds():g} s"
        approved = request.verdict is Verdict.APPROVE
        return Value({"approved": approved, "by": by, "reason": why})

    def _ask(self, work: Work, node: ApprovalNode) -> OpenCall:
        now, question = workflow.now(), self._filled(work, node.approval)
        call = ToolCall(id=self._call_id(work), tool=work.name, arguments={"question": question})
        expires_at = now + node.expires if node.expires else None
        request = ApprovalRequest(asked_at=now, expires_at=expires_at)
        each = OpenCall(call=call, policy=node.policy, request=request)
        self._state.calls.append(each)
        self._tell()
        return each

    def _call_id(self, work: Work) -> str:
        """Return the id of a node's call: the same at every replay, another at each attempt."""
        return f"{_call_prefix(work.path)}{work.state.tries}"

    def _find_call(self, call_id: str) -> OpenCall | None:
        return next((each for each in self._state.calls if each.call.id == call_id), None)

    def _filled(self, work: Work, template: str) -> str:
        """Return a text of a node with its references filled in."""
        return as_text(self._progress.filled(work.path, template))


def _call_prefix(path: NodePath) -> str:
    job_id, where = workflow.info().workflow_id, shown(path)
    if len(job_id) + len(where) > MAX_CALL_ID_CHARS:
        where = content_hash(where)[:16]
    return f"{job_id}/{where}/"


def _policy(called: ToolRef | SubAgent, node: WorkNode) -> Approval | None:
    """Return who must approve a call; undecided at the end of the node's time it is denied."""
    policy = called.approval_policy
    if policy is None or node.timeout is None:
        return policy
    expires = min(policy.expires or node.timeout, node.timeout)
    return policy.model_copy(update={"expires": expires})


def _parsed(content: str, who: str) -> JsonValue:
    try:
        value: JsonValue = from_json(content)
    except ValueError as error:
        raise NodeFailedError(f"what {who} returned is no JSON: {error}") from None
    return value


def _at_most(what: str, size: int, most: int) -> None:
    if size > most:
        raise NodeFailedError(f"{what} has {size:,} bytes, the limit is {most:,} bytes")
