"""Approval of calls: whether a call needs it, and the wait until people have decided.

Whether the arguments match a policy's rule is found out by an activity, since JSON schema is too
heavy for workflow code. Where it cannot be found out, people decide.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from pydantic import JsonValue
from temporalio import workflow
from temporalio.exceptions import ActivityError, is_cancelled_exception

with workflow.unsafe.imports_passed_through():
    from contracts.agent import SubAgent, ToolRef
    from contracts.approval import Approval, CheckApprovalInput, CheckApprovalResult, Verdict
    from contracts.job import AgentJobInput
    from contracts.name import CHECK_APPROVAL
    from contracts.tool import ToolOutcome
    from workflows import decision, failure, option, text
    from workflows.hold import Hold, Release
    from workflows.state import ApprovalRequest, JobState, OpenCall


class Approvals:
    """Lets a job's calls through, once they need nothing of people any more.

    `tell` makes known what waits.
    """

    def __init__(
        self,
        job: AgentJobInput,
        state: JobState,
        hold: Hold,
        *,
        time_left: Callable[[], timedelta],
        tell: Callable[[], None],
    ) -> None:
        self._job = job
        self._state = state
        self._hold = hold
        self._time_left = time_left
        self._tell = tell

    async def lets_through(self, each: OpenCall, called: ToolRef | SubAgent) -> bool:
        """Say whether a call may be made now.

        If not, it was denied and has its answer, or it is left to the next run.
        """
        policy = called.approval_policy
        if policy and not each.is_cleared and not await self._is_cleared(each, policy):
            return False
        return await self._hold.unpaused()

    async def _is_cleared(self, each: OpenCall, policy: Approval) -> bool:
        if each.request is None and policy.when is not None:
            if not await self._hold.unpaused():
                return False
            is_needed, note = await self._matches(each, policy.when)
            if not is_needed:
                each.is_cleared = True
                return True
            self._ask(each, policy, note)
        elif each.request is None:
            self._ask(each, policy)
        request = each.request
        assert request is not None
        release = await self._hold.wait(
            lambda: request.verdict is not None, expires_at=request.expires_at
        )
        if release is Release.ROLL_OVER:
            return False
        if request.verdict is Verdict.APPROVE:
            each.is_cleared = True
            return True
        each.answer, each.outcome = decision.denial(each.call.tool, request), ToolOutcome.ERROR
        self._state.count_answer(each.call.tool, ToolOutcome.ERROR, each.answer)
        self._tell()
        return False

    def _ask(self, each: OpenCall, policy: Approval, note: str = "") -> None:
        now = workflow.now()
        expires_at = now + policy.expires if policy.expires else None
        each.request = ApprovalRequest(asked_at=now, expires_at=expires_at, note=note)
        self._tell()

    async def _matches(self, each: OpenCall, when: dict[str, JsonValue]) -> tuple[bool, str]:
        """Return whether the arguments match the rule, and what people should know of that."""
        try:
            result: CheckApprovalResult = await workflow.execute_activity(
                CHECK_APPROVAL,
                CheckApprovalInput(job_id=workflow.info().workflow_id, call=each.call, when=when),
                result_type=CheckApprovalResult,
                summary=text.summary(f"does {each.call.tool} need approval?"),
                **option.check_approval_options(self._job, self._time_left()),
            )
        except ActivityError as error:
            if is_cancelled_exception(error):
                raise
            self._time_left()
            return True, f"its rule could not be checked: {failure.innermost(error)}"
        return result.is_needed, ""
