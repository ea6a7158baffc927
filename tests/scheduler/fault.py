"""Agents around a scheduler in a closed loop in which everything fails now and then, by a seed."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from inference_service.scheduler.event import (
    EngineLost,
    Event,
    FirstToken,
    KVEvicted,
    Node,
    SessionEnded,
    SessionIdle,
    StepCancelled,
    StepFailed,
    StepFinished,
    ToolsStarted,
    TouchDone,
)
from inference_service.scheduler.protocol import IllegalEventError
from inference_service.scheduler.setting import SchedulerSettings
from tests.scheduler.life import Life, Sitting
from tests.scheduler.step import CAPACITY, new_step, next_step

MAX_TURNS = 20_000
STEPS_OF_A_JOB = 4


@dataclass(frozen=True, slots=True)
class Faults:
    """How often each fault happens, in a turn of the loop."""

    engine_lost: float = 0.002
    capacity_changed: float = 0.004
    cancelled: float = 0.01
    duplicate: float = 0.05
    evicted: float = 0.05
    step_failed: float = 0.02
    touch_failed: float = 0.3


class FaultyWorld:
    """Runs `num_jobs` jobs to their ends: a step that failed or was lost comes back, if wanted."""

    def __init__(self, seed: int, num_jobs: int, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        capacity = replace(CAPACITY, max_num_seqs=self.rng.randint(1, 8), prefill_tokens=1_000)
        settings = SchedulerSettings(
            max_overtaken_s=self.rng.choice([5.0, 60.0]), max_queued_kv=1e9, max_sessions=1_000
        )
        self.life = Life(capacity, settings)
        self.waiting_jobs = [f"j{number}" for number in range(num_jobs)]
        self.left = dict.fromkeys(self.waiting_jobs, STEPS_OF_A_JOB)
        self.over: set[str] = set()
        self.cancelled: set[str] = set()
        self.returns: list[tuple[float, str]] = []

    def run(self) -> str:
        """Run until every job is over; returns a digest of all decisions."""
        for _ in range(MAX_TURNS):
            if not self.left:
                break
            self.turn()
        assert not self.left, f"jobs that never ended: {self.left}"
        digest = hashlib.blake2b(digest_size=8)
        for event, now, decisions in self.life.log:
            digest.update(f"{event!r} {now!r} {decisions!r}\n".encode())
        return digest.hexdigest()

    def turn(self) -> None:
        """Let one thing happen, or time pass."""
        self.note_who_is_gone()
        self.trouble()
        what = self.rng.random()
        if self.waiting_jobs and what < 0.3:
            self.begin(self.waiting_jobs.pop(self.rng.randrange(len(self.waiting_jobs))))
        elif self.life.touching and what < 0.6:
            self.touched(self.life.touching)
        elif self.life.running() and what < 0.8:
            self.work()
        elif self.returns:
            self.come_back()
        else:
            self.life.pass_time(self.rng.uniform(0, 3))

    def note_who_is_gone(self) -> None:
        """Let jobs whose session the scheduler has dropped try again, or be over if cancelled."""
        away = {job for _, job in self.returns} | {*self.waiting_jobs} | self.over
        for job in [job for job in self.left if job not in self.life.sessions]:
            if job in self.cancelled or job in self.over:
                self.left.pop(job)
            elif job not in away:
                self.waiting_jobs.append(job)

    def begin(self, job: str) -> None:
        """Tell the step of a job that the scheduler does not know, from its start or again."""
        if path := self.life.gone.get(job):
            node = Node(f"{job}/{len(path)}", path[-1].end + self.rng.randint(1, 60))
            step = new_step(job, 1)
            is_new = self.left[job] == STEPS_OF_A_JOB
            again = replace(step, step_id=node.id, path=(*path, node), is_new=is_new)
            self.life.tell(again)
        else:
            tokens = self.rng.choice([30, 200, 700])
            self.life.tell(new_step(job, tokens, opening=self.rng.choice([0, 16, 20])))

    def work(self) -> None:
        """Let a step in the engine get a token, finish or fail."""
        step_id, session = self.rng.choice(list(self.life.running().items()))
        if session.is_aborting or self.rng.random() < self.faults.step_failed:
            self.life.tell(StepFailed(step_id))
        elif not session.has_token:
            cached = self.rng.randint(0, session.path[-1].end - 1)
            self.life.tell(FirstToken(step_id, cached))
        else:
            self.finish(step_id, session)

    def finish(self, step_id: str, session: Sitting) -> None:
        """Let a step finish, and its job go on."""
        leaf = session.path[-1]
        output = self.rng.randint(1, 20)
        self.life.tell(StepFinished(step_id, Node(leaf.id, leaf.end + output)), is_last=False)
        self.left[session.id] -= 1
        if not self.left[session.id] or session.id in self.cancelled:
            self.over.add(session.id)
            self.life.tell(SessionEnded(session.id))
            return
        self.returns.append((self.life.now + self.rng.expovariate(0.2), session.id))
        if self.rng.random() < 0.1:
            self.life.forget(session.id)
            self.life.tell(SessionIdle(session.id))
        else:
            self.life.tell(ToolsStarted(session.id, (self.rng.choice(["web", "grep"]),)))

    def come_back(self) -> None:
        """Let the next tool return."""
        self.returns.sort()
        at, job = self.returns.pop(0)
        self.life.pass_time(max(0.0, at - self.life.now))
        if job in self.life.sessions:
            self.life.tell(next_step(self.life, job, self.rng.randint(1, 60)))
        else:
            self.begin(job)

    def touched(self, session_id: str) -> None:
        """Let the touch under way end."""
        session = self.life.sessions.get(session_id)
        failed = session is None or self.rng.random() < self.faults.touch_failed
        cached = -1 if failed or session is None else self.rng.randint(0, session.path[-1].end)
        self.life.tell(TouchDone(session_id, cached))

    # Faults

    def trouble(self) -> None:
        """Let each fault happen or not."""
        faults = self.faults
        if self.rng.random() < faults.engine_lost:
            self.life.tell(EngineLost())
        if self.rng.random() < faults.capacity_changed:
            blocks = self.rng.choice([80, 100, 150])
            self.life.tell(replace(self.life.capacity, num_blocks=blocks))
        here = [s for s in self.life.sessions.values() if s.step]
        if here and self.rng.random() < faults.cancelled:
            self.cancel(self.rng.choice(here))
        here = [s for s in self.life.sessions.values() if s.step]
        if here and self.rng.random() < faults.duplicate:
            self.refused(self.rng.choice(here))
        if self.life.sessions and self.rng.random() < faults.evicted:
            session = self.rng.choice(list(self.life.sessions.values()))
            left = self.rng.randint(0, session.path[-1].end)
            self.life.tell(KVEvicted(session.id, left))

    def cancel(self, session: Sitting) -> None:
        """Cancel a job, wherever its step is."""
        if session.step:
            self.cancelled.add(session.id)
            self.life.cancel(session)
            self.life.tell(StepCancelled(session.step.step_id))

    def refused(self, session: Sitting) -> None:
        """Tell what cannot be: a step that is here already."""
        event: Event | None = session.step
        assert event is not None
        try:
            self.life.scheduler.receive(event, self.life.now)
        except IllegalEventError:
            return
        raise AssertionError(f"{event} is here already")
