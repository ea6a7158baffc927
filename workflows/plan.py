"""`PlanWorkflow`: one job of a plan, node by node, as many at a time as may be.

Life of a job:
1. Check plan and input; `open_job` finds the tools of the plan, if it has any.
2. What may run is begun: `plan_progress` says what, `plan_node` does it.
3. An end of a node is noted, and what may run now is begun; until nothing is left.
4. What the plan gives is the job's answer: text as it is, all else as JSON.

A node that fails, its retries and fallback included, fails the job, if its policy says so: what
else runs is cancelled and awaited. `plan_state` then tells what is done, so that another job can
take it over. A limit stops the job. When the history grows long nothing new is begun, and when
nothing runs the job continues as new; questions to people are taken along.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import NoReturn

from pydantic_core import to_json
from temporalio import workflow
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    FailureError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from contracts.agent import PinnedTool, SubAgent, ToolRef
    from contracts.approval import JobWaits
    from contracts.error import BadInputError, LimitExceededError, MusterError
    from contracts.job import (
        AgentJobResult,
        JobMessage,
        JobStatus,
        OpenJobInput,
        OpenJobResult,
        StopReason,
    )
    from contracts.limit import MAX_ASSISTANT_BYTES, MAX_START_BYTES
    from contracts.name import (
        MESSAGE_UPDATE,
        OPEN_JOB,
        PLAN_QUERY,
        PLAN_STATE_QUERY,
        PLAN_WORKFLOW,
    )
    from contracts.plan_job import PlanProgress
    from workflows import failure, limit, option, plan_text, text
    from workflows.calling import cancel_and_wait
    from workflows.failure import LimitReachedError, OutOfTimeError
    from workflows.hold import Hold
    from workflows.job import JobWorkflow, history_is_long
    from workflows.plan_agent import as_agent_job, tool_agent
    from workflows.plan_check import check_plan, check_plan_input, check_tools
    from workflows.plan_node import NodeRunner
    from workflows.plan_progress import Progress
    from workflows.plan_state import BodyState, NodePath, PlanRunInput, PlanState, shown
    from workflows.reference import BadReferenceError
    from workflows.reference import shown as as_text
    from workflows.stepping import Stepper


@workflow.defn(name=PLAN_WORKFLOW)
class PlanWorkflow(JobWorkflow):
    """One job of one plan; the workflow id is the job id."""

    _state: PlanState

    @workflow.init
    def __init__(self, job: PlanRunInput) -> None:
        info = workflow.info()
        branch, carried = info.run_id.rpartition("-")[2], job.carried
        self._job = job
        self._plan = job.plan
        self._as_agent_job = as_agent_job(job)
        self._agent = self._as_agent_job.agent
        self._has_changed = False
        self._tasks: dict[NodePath, asyncio.Task[None]] = {}
        self._progress: Progress | None = None
        self._state = (
            carried.model_copy(update={"branch": branch})
            if carried
            else PlanState(
                branch=branch,
                deadline=info.workflow_start_time + job.plan.limits.max_wall_time,
                root=job.retried or BodyState(),
            )
        )
        self._hold = Hold(
            self._state,
            Stepper(self._as_agent_job, self._state, time_left=self._time_left),
            time_left=self._time_left,
            is_rolling_over=self._is_rolling_over,
            say=self._say,
        )
        self._hold.split(0)

    @workflow.run
    async def run(self, job: PlanRunInput) -> AgentJobResult:
        """Run the plan to its end or to a limit.

        Fails with an `ApplicationError` whose type names the kind and whose first detail, if any,
        is a hint.
        """
        if job.carried is None:
            self._enter(JobStatus.RUNNING, "opening the job")
        try:
            result = await self._follow()
        except (ActivityError, ApplicationError, MusterError, asyncio.CancelledError) as error:
            self._is_ending = True
            self._end_badly(error)
        self._is_ending = True
        if result.stop_reason is StopReason.ANSWERED:
            self._enter(JobStatus.COMPLETED, "done")
        else:
            self._enter(JobStatus.STOPPED, f"stopped: {result.stop_reason} reached")
        return result

    @workflow.query(name=PLAN_QUERY)
    def plan(self) -> PlanProgress:
        """Return how the plan's nodes stand."""
        running = self._progress.running if self._progress else ()
        return plan_text.plan_progress(self._plan, self._state.root, running)

    @workflow.query(name=PLAN_STATE_QUERY)
    def plan_state(self) -> BodyState:
        """Return what is done, for a job that takes it over."""
        return self._state.root

    @workflow.update(name=MESSAGE_UPDATE)
    def message(self, message: JobMessage) -> None:
        """Take no message: there is nobody who could read it."""

    @message.validator
    def _check_message(self, message: JobMessage) -> None:
        with failure.as_refusal():
            raise BadInputError("a plan reads no messages", hint="its agents' jobs do")

    async def _follow(self) -> AgentJobResult:
        """Run what is to be run and return the job's result."""
        try:
            if self._job.carried is None:
                check_plan(self._plan)
                check_plan_input(self._plan, self._job.input)
                limit.check_input(workflow.info().workflow_id, self._as_agent_job)
                self._state.pinned = list(await self._open())
            callables = tool_agent(self._plan).pinned(self._state.pinned).callables
            check_tools(self._plan, callables)
            progress = Progress(self._plan, self._state.root, self._job.input)
            await self._walk(progress, {each.tool_name: each for each in callables})
            return self._result(progress)
        except LimitReachedError as reached:
            return self._state.result(reached.stop_reason)

    async def _open(self) -> tuple[PinnedTool, ...]:
        """Find the plan's tools, so that a plan with wrong ones fails before it begins."""
        if not self._plan.tools and not self._plan.agents:
            return ()
        agent, tenant = tool_agent(self._plan), self._job.tenant
        try:
            opened: OpenJobResult = await workflow.execute_activity(
                OPEN_JOB,
                OpenJobInput(job_id=workflow.info().workflow_id, agent=agent, tenant=tenant),
                result_type=OpenJobResult,
                summary=text.summary(f"open job of plan {self._plan.name}"),
                **option.open_job_options(self._as_agent_job, self._time_left(), agent),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            raise failure.open_job_failure(error) from error
        return opened.tools

    async def _walk(self, progress: Progress, callables: dict[str, ToolRef | SubAgent]) -> None:
        """Run nodes until none is left to run, or until something ends the job."""
        self._progress = progress
        runner = NodeRunner(
            self._as_agent_job,
            self._state,
            self._hold,
            progress,
            callables,
            tell=self._tell,
            time_left=self._time_left,
            is_rolling_over=self._is_rolling_over,
        )
        try:
            await self._go_on(progress, runner)
        except (LimitReachedError, FailureError, MusterError, asyncio.CancelledError):
            await self._stop_rest(runner)
            raise
        await self._stop_rest(runner)

    async def _go_on(self, progress: Progress, runner: NodeRunner) -> None:
        """Begin what may run, each time that something has changed, until all is over."""
        while True:
            self._has_changed = False
            self._begin(progress, runner)
            self._reap(progress, runner)
            if progress.is_over:
                return
            if self._is_rolling_over() and not self._tasks:
                self._roll_over()
            assert self._tasks or self._state.paused, "nothing runs, and nothing is over"
            self._state.doing = plan_text.running_line(progress.running)
            self._hold.tell()
            if self._state.paused and not self._is_rolling_over():
                self._hold.begin_part()
                await self._hold.wait(lambda: self._state.paused is None or self._has_changed)
                self._hold.end_part()
            else:
                await workflow.wait_condition(lambda: self._has_changed)

    def _begin(self, progress: Progress, runner: NodeRunner) -> None:
        while self._state.paused is None and not self._is_rolling_over():
            path = progress.take()
            if path is None:
                return
            task = self._tasks[path] = asyncio.create_task(runner.run(path))
            task.add_done_callback(self._note_end)

    def _note_end(self, _: asyncio.Task[None]) -> None:
        self._has_changed = True

    def _reap(self, progress: Progress, runner: NodeRunner) -> None:
        """Cancel what nothing is expected of any more, and raise what ends the job."""
        for path in progress.take_dropped():
            self._tasks[path].cancel()
        for path, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[path]
            is_gone = not progress.has(path)
            if is_gone:
                runner.forget(path)
                progress.hand_back(path)
            error = None if task.cancelled() else task.exception()
            if error is not None and not (is_gone and is_cancelled_exception(error)):
                raise error

    async def _stop_rest(self, runner: NodeRunner) -> None:
        """Cancel and await what still runs, so that what it has used is counted."""
        self._is_ending = runner.is_stopping = True
        errors = await cancel_and_wait(list(self._tasks.values()))
        for error in errors:
            known = (LimitReachedError, FailureError, MusterError, asyncio.CancelledError)
            if not isinstance(error, known):
                raise error

    def _result(self, progress: Progress) -> AgentJobResult:
        """Return the result of a plan that is over; raises what it failed with."""
        if progress.failure is not None:
            path, why = progress.failure
            raise failure.node_failure(shown(path), why, workflow.info().workflow_id)
        try:
            answer = as_text(progress.output())
        except BadReferenceError as error:
            raise BadReferenceError(
                f"the plan, `output`: {error.message}", hint=error.hint
            ) from error
        size = len(to_json(answer))
        if size > MAX_ASSISTANT_BYTES:
            raise LimitExceededError("what the plan gives, as JSON,", size, MAX_ASSISTANT_BYTES,
                                     "bytes", hint="name less in the plan's `output`")  # fmt: skip
        return self._state.result(StopReason.ANSWERED, answer)

    def _is_rolling_over(self) -> bool:
        """Say whether nothing new may be scheduled in this run."""
        return history_is_long() and not self._is_ending

    def _roll_over(self) -> NoReturn:
        """Continue as new; nothing runs now."""
        if workflow.cancellation_reason() is not None:
            raise asyncio.CancelledError
        job = self._job.model_copy(update={"carried": self._state, "retried": None})
        size = len(to_json(job))
        if size > MAX_START_BYTES:
            raise LimitExceededError(
                "what the plan's job hands on, as JSON,", size, MAX_START_BYTES, "bytes",
                hint="make the plan's values smaller, or its maps less wide",
            )  # fmt: skip
        workflow.continue_as_new(job)

    def _time_left(self) -> timedelta:
        """Return the wall time that is left, above zero; raises `OutOfTimeError` if none is."""
        left = self._state.deadline - workflow.now()
        if left <= timedelta(0):
            raise OutOfTimeError
        return left

    def _details(self, waits: JobWaits) -> str:
        return plan_text.details(self._plan, self._state, self.plan(), waits)

    def _changed(self) -> None:
        self._has_changed = True
        self._hold.tell()
