"""Large contents: read whole by the model, kept by reference, or one clear error in one attempt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import JsonValue

from contracts.error import LimitExceededError
from contracts.limit import MAX_ASSISTANT_BYTES
from contracts.llm_step import LLMStepInput, OutputForm
from contracts.message import BlobRef, ContextRef, Message, Role
from inference_service.engine.byte_tokenizer import ByteTokenizer
from inference_service.engine.protocol import EngineRequest
from inference_service.engine.simulated import SimulatedConfig
from inference_service.session import Sessions
from store.attempt import AttemptOutcome
from store.context import ContextStore, NotStoredError
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input

LONG = SimulatedConfig(time_scale=0.0, max_model_len=5_000_000, num_blocks=160_000)
MISSING = BlobRef(digest="0" * 64, bytes=20_000)


def tool_message(blob: BlobRef) -> Message:
    return Message(
        role=Role.TOOL, content="The preview.", tool="read", tool_call_id="call-1", blob=blob
    )


def reading(number: int, message: Message, base: ContextRef | None = None) -> LLMStepInput:
    return step_input(number, base=base).model_copy(update={"append": (message,)})


def decoded(ids: Any) -> str:
    return ByteTokenizer().decode(list(ids))


async def outcomes(h: Harness, step: LLMStepInput) -> list[AttemptOutcome]:
    return [attempt.outcome for attempt in await h.ledger.attempts(step.step_id)]


@pytest.mark.parametrize("size", [20_000, 4_000_000])
async def test_the_model_reads_the_whole_text_and_the_conversation_keeps_its_name(
    database: Database, size: int
) -> None:
    async with harness(database, config=LONG) as h:
        text = "z" * size
        first = await h.run(step_input(0))
        message = tool_message(await h.contexts.put_text(text))
        second = await h.run(reading(1, message, first.context))
        assert second.context is not None
        prompt = decoded(h.requests[-1].prompt_token_ids)
        assert text in prompt
        assert "The preview." not in prompt
        assert (await h.contexts.load(second.context.head))[2] == message


async def test_a_prompt_rendered_whole_is_the_prompt_that_grew(database: Database) -> None:
    async with harness(database) as h:
        first = await h.run(step_input(0))
        message = tool_message(await h.contexts.put_text("z" * 20_000))
        second = await h.run(reading(1, message, first.context))
        last = step_input(2, base=second.context, text="And?")
        await h.run(last)
        grown = list(h.requests[-1].prompt_token_ids)
    other = ByteTokenizer()
    other.digest = "another"  # so that no token run fits, and messages are rendered anew
    rendered = await Sessions(other, ContextStore(database)).resolve(last, {})
    assert rendered.token_ids.tolist() == grown


async def test_a_text_that_is_not_stored_is_one_clear_error(database: Database) -> None:
    async with harness(database) as h:
        step = reading(0, tool_message(MISSING))
        with pytest.raises(NotStoredError, match="the result of tool 'read'") as caught:
            await h.run(step)
        assert "20,000 bytes" in str(caught.value)
        assert not caught.value.retryable
        assert await outcomes(h, step) == [AttemptOutcome.FAILED]
        assert h.requests == []


async def test_a_text_longer_than_the_context_window_is_one_clear_error(database: Database) -> None:
    async with harness(database) as h:
        step = reading(0, tool_message(await h.contexts.put_text("z" * 4_000_000)))
        with pytest.raises(LimitExceededError, match="the model's context window") as caught:
            await h.run(step)
        assert "has 4,000,2" in str(caught.value)
        assert "the limit is 32,768 tokens" in str(caught.value)
        assert await outcomes(h, step) == [AttemptOutcome.FAILED]


async def test_a_conversation_of_two_thousand_messages_opens_and_steps(database: Database) -> None:
    examples = [
        Message(role=(Role.USER, Role.ASSISTANT)[number % 2], content=f"Message {number}.")
        for number in range(2_000)
    ]
    opening = [Message(role=Role.SYSTEM, content="Be brief."), *examples]
    async with harness(database, config=LONG) as h:
        head, _ = await h.contexts.open("job-a", opening, None)
        first = await h.run(step_input(0, base=ContextRef(head=head)))
        await h.run(step_input(1, base=first.context))
        prompts = [decoded(request.prompt_token_ids) for request in h.requests]
    assert all("Message 0." in prompt and "Message 1999." in prompt for prompt in prompts)


async def toolset(h: Harness, num_tools: int, description: str) -> str:
    one: JsonValue = {"type": "string", "description": description}
    properties = {f"p{n}": one for n in range(10)}
    arguments: JsonValue = {"type": "object", "properties": properties, "required": []}
    return await h.contexts.put_blob(
        [
            {"name": f"tool_{n}", "description": "A tool.", "arguments": arguments}
            for n in range(num_tools)
        ]
    )


def calling(arguments: dict[str, str]) -> Any:
    def respond(request: EngineRequest, prompt: str) -> str:
        return json.dumps({"tool": "tool_0", "arguments": arguments})

    return respond


async def test_a_hundred_kilobytes_of_tool_schemas_serve_steps(database: Database) -> None:
    async with harness(database, config=LONG, respond=calling({"p0": "x"})) as h:
        digest = await toolset(h, 64, "d" * 160)
        assert len(json.dumps(await h.contexts.get_blob(digest))) > 100_000
        form = OutputForm(tools=tuple(f"tool_{n}" for n in range(64)))
        result = await h.run(step_input(0, toolset=digest, output=form))
        assert result.message is not None
        assert result.message.tool_calls[0].arguments == {"p0": "x"}


async def test_arguments_of_a_megabyte_are_one_clear_error(database: Database) -> None:
    respond = calling({"p0": "x" * 1_000_000})
    async with harness(database, config=LONG, respond=respond) as h:
        step = step_input(0, toolset=await toolset(h, 1, "d"), output=OutputForm(tools=("tool_0",)))
        longer = step.sampling.model_copy(update={"max_tokens": 2_000_000})  # a byte is a token
        step = step.model_copy(update={"sampling": longer})
        with pytest.raises(LimitExceededError, match="the assistant message of LLM step") as caught:
            await h.run(step)
        assert "with its tool calls, as JSON has 2,000,1" in str(caught.value)
        assert f"the limit is {MAX_ASSISTANT_BYTES:,} bytes" in str(caught.value)
        assert await outcomes(h, step) == [AttemptOutcome.FAILED]
