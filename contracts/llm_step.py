"""One LLM step: what the workflow asks of the inference service, and what comes back."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum

from pydantic import AwareDatetime, Field, JsonValue

from contracts.agent import Sampling
from contracts.message import ContextRef, Frozen, Message


class Outcome(StrEnum):
    """How an LLM step that returns has ended; failures are raised instead."""

    FINISHED = "finished"
    CANCELLED = "cancelled"


class FinishReason(StrEnum):
    """Why generation ended, in vLLM's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class OutputForm(Frozen):
    """What the assistant message may be.

    With `tools` empty and no `json_schema`: free text. With `tools`: a call of one of them (up to
    `max_calls` calls), or an answer if `may_answer`. With `json_schema`: text that satisfies it.
    """

    tools: tuple[str, ...] = ()
    may_answer: bool = True
    max_calls: int = Field(1, ge=1)
    json_schema: dict[str, JsonValue] | None = None


class FanOutHint(Frozen):
    """A group of LLM steps that their job will join on; `size` of them belong to it."""

    group: str = Field(min_length=1, max_length=200)
    size: int = Field(ge=1)


class Hints(Frozen):
    """What the scheduler may use to order steps; no hint changes a result.

    `priority` as in vLLM and Temporal: lower is earlier, 1 to 5. `attained_s` is the engine time,
    in seconds, that the job's earlier steps have used. After `deadline` nobody wants the result any
    more: a step that still waits then fails for good. A step with a `speculative_ttl` may turn out
    to be needless; it goes last, and is dropped when it has waited that long.
    """

    priority: int = Field(3, ge=1, le=5)
    attained_s: float = Field(0.0, ge=0.0)
    tenant: str = "default"
    deadline: AwareDatetime | None = None
    fan_out: FanOutHint | None = None
    speculative_ttl: timedelta | None = Field(None, gt=timedelta(0))


class SessionState(StrEnum):
    """What a job that takes no LLM step now does, as far as only its workflow knows."""

    ENDED = "ended"
    """It will take no further step."""
    WAITING = "waiting"
    """It waits for a person or a timer."""


class SessionHint(Frozen):
    """Input of the `session_hint` activity: what became of a job's sessions."""

    job_id: str
    state: SessionState


class LLMStepInput(Frozen):
    """Input of the `llm_step` activity.

    `step_id` is `job_id/branch/counter`, the same over retries and replays. The prompt is the
    stored conversation `base` followed by `append`. `toolset` is the hash that `open_job` returned.
    """

    step_id: str = Field(min_length=3, max_length=200)
    job_id: str
    model: str
    base: ContextRef | None
    append: tuple[Message, ...] = Field(min_length=1)
    toolset: str | None = None
    output: OutputForm = OutputForm()
    sampling: Sampling = Sampling()
    hints: Hints = Hints()

    @property
    def is_first(self) -> bool:
        """Whether no model has spoken in its conversation yet."""
        return self.base is None or self.base.token_run is None


class Usage(Frozen):
    """Tokens, summed over all attempts of a step (or all steps of a job).

    `cached_tokens` of the `prompt_tokens` came from the engine's prefix cache. `wasted_tokens` of
    the `completion_tokens` belong to attempts and samples whose result was not kept. `lower_bound`
    marks counts that miss what a killed process did after its last record.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    wasted_tokens: int = 0
    lower_bound: bool = False

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            wasted_tokens=self.wasted_tokens + other.wasted_tokens,
            lower_bound=self.lower_bound or other.lower_bound,
        )


class StepTiming(Frozen):
    """Where the accepted attempt's time went inside the service, in seconds, from one clock.

    `ready_wait_s` is the wait for the scheduler. Temporal's own share (`orchestration`) is not
    here: it is the step's total, from server event times, less the sum of these.
    """

    host_pre_s: float = 0.0
    ready_wait_s: float = 0.0
    engine_queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    host_post_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Sum of all parts, in seconds."""
        return (
            self.host_pre_s
            + self.ready_wait_s
            + self.engine_queue_s
            + self.prefill_s
            + self.decode_s
            + self.host_post_s
        )


class Divergence(Frozen):
    """A prompt that differs from the session it goes on: at token `position` of `base_length`."""

    position: int = Field(ge=0)
    base_length: int = Field(ge=0)


class LLMStepResult(Frozen):
    """Result of the `llm_step` activity.

    `context` names the conversation with the assistant `message` at its end; it is the old base
    when the step was cancelled, and `message` is None then. `cohort_size` is the number of steps
    dispatched to the engine together with this one, itself included. `diverged` is set where the
    chat template rewrote what the session holds, so that its cache was lost from there on.
    """

    step_id: str
    outcome: Outcome
    context: ContextRef | None
    message: Message | None
    finish_reason: FinishReason
    usage: Usage
    timing: StepTiming
    replica: str
    epoch: int = Field(ge=1)
    cohort_size: int = Field(0, ge=0)
    diverged: Divergence | None = None


class StepPhase(StrEnum):
    """Where an LLM step is, as its heartbeats tell."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"


class StepHeartbeat(Frozen):
    """Heartbeat details of `llm_step`: phase, place in line, tokens generated so far."""

    phase: StepPhase
    place_in_line: int | None = None
    completion_tokens: int = 0
