"""The scheduler's shell: what it tells of steps and sessions, and how it carries out decisions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NoReturn

import pytest

from contracts.llm_step import (
    Outcome,
    SessionHint,
    SessionState,
    StepPhase,
)
from contracts.message import ContextRef, Message, Role
from inference_service.engine.protocol import EngineDeadError, EngineRequest
from inference_service.engine.simulated import SimulatedConfig
from inference_service.failure import (
    DrainingError,
    NoProgressError,
    StaleAttemptError,
    StaleStepError,
    StepFailedTooOftenError,
)
from inference_service.generation import StopCause
from inference_service.prompt import InvalidOutputError
from inference_service.scheduler.decision import Abort, Prewarm, Refresh, Reject, Shed
from inference_service.scheduler.event import (
    EngineLost,
    FanOut,
    SessionEnded,
    SessionIdle,
    StepFailed,
    StepFinished,
    StepReady,
    ToolsStarted,
    TouchDone,
)
from store.database import Database
from tests.inference_service.harness import step_input, until
from tests.inference_service.scripted_service import CALL, FORM, acting, decide, scripted, toolset

SLOW = SimulatedConfig(time_scale=1.0)


async def test_a_job_that_goes_straight_on_is_one_session_with_a_growing_path(
    database: Database,
) -> None:
    async with scripted(database, CALL, CALL) as (h, scheduler):
        first = await acting(h, 0)
        second = await acting(h, 1, base=first.context)
        await h.run(step_input(2, base=second.context))
    one, two, three = scheduler.told(StepReady)
    assert one.session == two.session == three.session == one.step_id
    assert [r.is_new for r in (one, two, three)] == [True, False, False]
    ends = scheduler.told(StepFinished)
    assert two.path == (ends[0].leaf, two.path[-1])
    assert three.path == (ends[0].leaf, ends[1].leaf, three.path[-1])
    assert [request.prompt_tokens for request in (one, two, three)] == [
        len(request.prompt_token_ids) for request in h.requests
    ]
    assert ends[0].leaf.end == one.prompt_tokens + first.usage.completion_tokens


async def test_a_fork_is_a_session_of_its_own_that_shares_nodes(database: Database) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        base = (await acting(h, 0)).context
        scheduler.holds = True
        for number in (1, 2):
            await h.attach(step_input(number, base=base))
        await until(lambda: len(scheduler.told(StepReady)) == 3)
        scheduler.holds = False
        await h.run(step_input(3, base=base))
    first, *branches = scheduler.told(StepReady)
    assert branches[0].session == first.session
    assert len({ready.session for ready in branches}) == 3
    (shared,) = {ready.path[0] for ready in branches}
    assert shared == scheduler.told(StepFinished)[0].leaf


async def test_jobs_with_one_opening_share_its_node(database: Database) -> None:
    async with scripted(database, "One.", "Two.", CALL) as (h, scheduler):
        head = await h.contexts.put(None, [Message(role=Role.SYSTEM, content="Be brief.")])
        for job in ("job-a", "job-b"):
            await h.run(step_input(job_id=job, base=ContextRef(head=head)))
        await acting(h, job_id="job-c", base=ContextRef(head=head))
    one, two, other = scheduler.told(StepReady)
    assert one.path[0] == two.path[0]
    assert one.path[1] != two.path[1]
    assert other.path[0] != one.path[0], "other tools, other tokens"


async def test_after_a_restart_the_base_is_one_node(database: Database) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        first = await acting(h, 0)
    async with scripted(database) as (h, again):
        await h.run(step_input(1, base=first.context))
    (ready,) = again.told(StepReady)
    base, own = ready.path
    assert base.end == scheduler.told(StepFinished)[0].leaf.end < own.end
    assert not ready.is_new


async def test_tool_calls_and_answers_say_what_the_session_does(database: Database) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        first = await acting(h, 0)
        session = step_input(0).step_id
        assert scheduler.told(ToolsStarted) == [ToolsStarted(session, ("search",))]
        await h.run(step_input(1, base=first.context))
        assert scheduler.events[-1] == SessionEnded(session)


async def test_a_failure_ends_the_session_only_if_it_is_for_good(database: Database) -> None:
    async with scripted(database, *["{cut"] * 6) as (h, scheduler):
        for error, ended in (
            (InvalidOutputError, 0),
            (InvalidOutputError, 0),
            (StepFailedTooOftenError, 1),
        ):
            with pytest.raises(error):
                await acting(h, 0)
            assert len(scheduler.told(SessionEnded)) == ended
    assert len(scheduler.told(StepFailed)) == 3
    assert len({ready.session for ready in scheduler.told(StepReady)}) == 1


async def test_a_cancelled_step_ends_its_session(database: Database) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        first = await acting(h, 0)
        scheduler.holds = True
        generation, attempt = await h.attach(step_input(1, base=first.context))
        await until(lambda: bool(generation.ready_s))
        await h.stop(generation, attempt, StopCause.CANCELLED)
        assert scheduler.events[-1] == SessionEnded(step_input(0).step_id)


async def test_a_result_that_another_owner_took_over_ends_the_session(database: Database) -> None:
    async with scripted(database, "word " * 8, config=SLOW) as (h, scheduler):
        generation, _ = await h.attach(step_input())
        await until(lambda: bool(generation.first_token_s))
        await h.ledger.claim(
            step=step_input(), digest=generation.digest, replica="other", task_token=b"new"
        )
        with pytest.raises(StaleAttemptError):
            await generation.task
        assert scheduler.told(StepFinished)
        assert scheduler.events[-1] == SessionEnded(step_input().step_id)


async def test_a_hint_ends_or_idles_the_sessions_of_its_job_only(database: Database) -> None:
    async with scripted(database, CALL, CALL) as (h, scheduler):
        await acting(h, 0, job_id="job-a")
        await acting(h, 0, job_id="job-b")
        h.service.hint(SessionHint(job_id="job-a", state=SessionState.WAITING))
        assert scheduler.told(SessionIdle) == [SessionIdle(step_input(job_id="job-a").step_id)]
        h.service.hint(SessionHint(job_id="job-b", state=SessionState.ENDED))
        assert scheduler.events[-1] == SessionEnded(step_input(job_id="job-b").step_id)
        num_events = len(scheduler.events)
        h.service.hint(SessionHint(job_id="job-b", state=SessionState.ENDED))
        assert len(scheduler.events) == num_events, "it is known no more"


async def test_a_hint_that_comes_while_a_step_runs_ends_the_session_after_it(
    database: Database,
) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        scheduler.holds = True
        generation, _ = await h.attach(step_input(toolset=await toolset(h), output=FORM))
        await until(lambda: bool(generation.ready_s))
        h.service.hint(SessionHint(job_id="job-a", state=SessionState.ENDED))
        assert not scheduler.told(SessionEnded)
        scheduler.holds = False
        await decide(h, scheduler)
        await generation.task
        assert scheduler.events[-1] == SessionEnded(generation.step_id)
        assert not scheduler.told(ToolsStarted)


@pytest.mark.parametrize("kind", [Refresh, Prewarm])
async def test_a_touch_is_the_beginning_of_the_context_and_belongs_to_no_step(
    database: Database, kind: type[Refresh] | type[Prewarm]
) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        result = await acting(h, 0)
        session = scheduler.told(StepReady)[0].session
        await decide(h, scheduler, kind(session, 33))
        await until(lambda: bool(scheduler.told(TouchDone)))
        assert scheduler.told(TouchDone) == [TouchDone(session, 32)]
        step, touch = h.requests
        assert list(touch.prompt_token_ids) == list(step.prompt_token_ids)[:33]
        assert (touch.max_tokens, touch.temperature) == (1, 0.0)
        assert touch.priority > 5
        overhead = h.service.dispatcher.touches.overhead
        assert overhead.computed_tokens == 33 - 32 + 1
        assert (overhead.refreshes, overhead.prewarms) == ((1, 0) if kind is Refresh else (0, 1))
        (row,) = await h.ledger.attempts(result.step_id)
        assert row.usage == result.usage


async def test_a_touch_that_cannot_be_made_is_told_too(database: Database) -> None:
    async with scripted(database) as (h, scheduler):
        await decide(h, scheduler, Refresh("nobody", 33))
        await until(lambda: bool(scheduler.told(TouchDone)))
        assert scheduler.events == [TouchDone("nobody", -1)]
        assert h.service.dispatcher.touches.overhead.failures == 1


async def test_a_touch_that_meets_a_fault_is_told_too(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        await acting(h, 0)
        session = scheduler.told(StepReady)[0].session

        def fault(request: EngineRequest) -> NoReturn:
            raise AttributeError("a fault of the adapter")

        monkeypatch.setattr(h.engine, "generate", fault)
        await decide(h, scheduler, Refresh(session, 33))
        await until(lambda: bool(scheduler.told(TouchDone)))
        assert scheduler.told(TouchDone) == [TouchDone(session, -1)]


async def test_a_touch_is_aborted_when_the_service_drains(database: Database) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        await acting(h, 0)
        session = scheduler.told(StepReady)[0].session
        h.engine.stall()
        await decide(h, scheduler, Refresh(session, 33))
        await until(lambda: len(h.requests) == 2)
        h.service.drain()
        await until(lambda: bool(scheduler.told(TouchDone)))
        assert scheduler.told(TouchDone) == [TouchDone(session, -1)]
        assert len(h.service.dispatcher.touches) == 0


async def test_a_touch_dies_silently_with_its_engine(database: Database) -> None:
    """The scheduler is told of the engine, and with it of all that was in it."""
    async with scripted(database, CALL) as (h, scheduler):
        await acting(h, 0)
        session = scheduler.told(StepReady)[0].session
        h.engine.stall()
        await decide(h, scheduler, Refresh(session, 33))
        await until(lambda: len(h.requests) == 2)
        generation, _ = await h.attach(step_input(job_id="job-b"))
        await until(lambda: len(h.requests) == 3)
        h.engine.die()
        with pytest.raises(EngineDeadError):
            await generation.task
        assert scheduler.told(EngineLost)
        await until(lambda: len(h.service.dispatcher.touches) == 0)
        assert not scheduler.told(TouchDone)


async def test_shed_work_fails_for_good_and_says_why(database: Database) -> None:
    async with scripted(database) as (h, scheduler):
        scheduler.holds = True
        generation, _ = await h.attach(step_input())
        await until(lambda: bool(generation.ready_s))
        await decide(h, scheduler, Shed(generation.step_id, "its deadline has passed"))
        with pytest.raises(StaleStepError, match="its deadline has passed") as caught:
            await generation.task
        assert not caught.value.retryable
        assert scheduler.events[-1] == SessionEnded(generation.step_id)
        assert not h.requests


async def test_running_work_that_the_scheduler_aborts_is_stale(database: Database) -> None:
    async with scripted(database, "word " * 80, config=SLOW) as (h, scheduler):
        generation, _ = await h.attach(step_input())
        await until(lambda: bool(generation.first_token_s))
        await decide(h, scheduler, Abort(generation.step_id))
        with pytest.raises(StaleStepError):
            await generation.task
        assert scheduler.told(StepFailed) == [StepFailed(generation.step_id)]


async def test_orders_for_a_step_that_has_just_left_stop_nothing_else(database: Database) -> None:
    """A step can end by itself in the turn of the loop in which its abort is decided."""
    async with scripted(database) as (h, scheduler):
        scheduler.due += [Abort("gone"), Shed("gone", "too late"), Reject("gone", "cache", 2, 1)]
        assert (await h.run(step_input())).outcome is Outcome.FINISHED
        assert h.service.dispatcher.tally.shed == 0


async def test_a_scheduler_that_breaks_takes_the_replica_down_and_no_step_with_it(
    database: Database,
) -> None:
    async with scripted(database) as (h, scheduler):
        h.engine.stall()
        running, _ = await h.attach(step_input())
        await until(lambda: running.phase is StepPhase.PREFILL)
        scheduler.breaks = True
        waiting, _ = await h.attach(step_input(job_id="job-b"))
        for generation, error in ((running, NoProgressError), (waiting, DrainingError)):
            with pytest.raises(error):
                await generation.task
        assert h.service.engine_died.is_set()
        assert "the scheduler has failed: AssertionError: broken" in h.service.trouble


async def test_the_scheduler_is_called_when_time_alone_changes_something(
    database: Database,
) -> None:
    async with scripted(database, CALL) as (h, scheduler):
        await acting(h, 0)
        scheduler.wake_s = h.service.dispatcher.now() + 0.05
        await decide(h, scheduler)
        await until(lambda: scheduler.wake_s is None)


async def test_hints_reach_the_scheduler_in_its_own_time(database: Database) -> None:
    hints = {
        "deadline": datetime.now(UTC) + timedelta(seconds=60),
        "fan_out": {"group": "g", "size": 3},
        "speculative_ttl": timedelta(seconds=5),
        "tenant": "acme",
        "priority": 1,
        "attained_s": 2.5,
    }
    async with scripted(database) as (h, scheduler):
        now = h.service.dispatcher.now()
        await h.run(step_input(hints=hints))
    (ready,) = scheduler.told(StepReady)
    assert ready.deadline_s == pytest.approx(now + 60, abs=5)
    assert ready.expires_s == pytest.approx(now + 5, abs=5)
    assert (ready.fan_out, ready.is_speculative) == (FanOut("g", 3), True)
    assert (ready.tenant, ready.priority, ready.attained_s) == ("acme", 1, 2.5)
    assert ready.job == "job-a"
