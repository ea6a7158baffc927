"""Small inputs and results of LLM steps for the store's tests."""

from __future__ import annotations

from contracts.llm_step import FinishReason, LLMStepInput, LLMStepResult, Outcome, StepTiming, Usage
from contracts.message import ContextRef, Message, Role
from store.context import TokenRun, chain

TOKENIZER = "tokenizer-1"


def user(text: str) -> Message:
    return Message(role=Role.USER, content=text)


def assistant(text: str) -> Message:
    return Message(role=Role.ASSISTANT, content=text)


def step_input(step_id: str = "job-1/b/1", base: ContextRef | None = None) -> LLMStepInput:
    return LLMStepInput(
        step_id=step_id,
        job_id=step_id.split("/", maxsplit=1)[0],
        model="tiny",
        base=base,
        append=(user("hello"),),
    )


def step_result(
    step: LLMStepInput, epoch: int, usage: Usage, answer: str = "hi"
) -> tuple[LLMStepResult, list[Message]]:
    """Return a finished result and all the messages that its commit adds."""
    parent = step.base.head if step.base else None
    messages = [*step.append, assistant(answer)]
    result = LLMStepResult(
        step_id=step.step_id,
        outcome=Outcome.FINISHED,
        context=ContextRef(head=chain(parent, messages)[-1].hash, token_run=step.step_id),
        message=messages[-1],
        finish_reason=FinishReason.STOP,
        usage=usage,
        timing=StepTiming(),
        replica="engine-0",
        epoch=epoch,
    )
    return result, messages


def token_run(step: LLMStepInput, token_ids: list[int], tokenizer: str = TOKENIZER) -> TokenRun:
    parent = step.base.token_run if step.base else None
    return TokenRun(step.step_id, parent, tokenizer, token_ids)
