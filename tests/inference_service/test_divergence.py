"""Chat templates that rewrite what a session holds: found at start, reported where they do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import httpx
import pytest
from prometheus_client import CollectorRegistry
from pydantic import JsonValue, TypeAdapter

from contracts.agent import ToolSchema
from contracts.llm_step import LLMStepResult
from inference_service.engine.byte_tokenizer import ByteTokenizer
from inference_service.engine.protocol import EngineCapacity, EngineRequest
from inference_service.http import http_app
from inference_service.scheduler.event import CapacityChanged, StepReady
from inference_service.template import ChatTemplate
from store.database import Database
from tests.inference_service.harness import Harness, harness, step_input
from tests.inference_service.scripted import ScriptedScheduler

Chat = list[dict[str, str]]
Rewrite = Callable[[Chat], Chat]

CAPACITY = EngineCapacity(1, 1, 1, 1, 1)
TOOLSET = TypeAdapter(dict[str, ToolSchema])
REASONED = "<think>\nHm.\n</think>\n\nYes."


class RewritingTokenizer(ByteTokenizer):
    """A template that rewrites the conversation before it renders it."""

    def __init__(self, rewrite: Rewrite) -> None:
        super().__init__()
        self._rewrite = rewrite

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        rewritten = self._rewrite([dict(message) for message in messages])
        return super().render(rewritten, add_generation_prompt=add_generation_prompt)


def drop_reasoning(chat: Chat) -> Chat:
    """Show reasoning only behind the last user's message, as Qwen3 and others do."""
    last_user = max((n for n, m in enumerate(chat) if m["role"] == "user"), default=-1)
    return [
        m | {"content": re.sub(r"<think>.*</think>\n\n", "", m["content"], flags=re.DOTALL)}
        if n < last_user
        else m
        for n, m in enumerate(chat)
    ]


def number_turns(chat: Chat) -> Chat:
    """Rewrite the first message with each turn."""
    first = chat[0] | {"content": f"{len(chat)} messages. {chat[0]['content']}"}
    return [first, *chat[1:]]


def forget_old(chat: Chat) -> Chat:
    """Show no more than the last five messages."""
    return chat[-5:]


def move_system(chat: Chat) -> Chat:
    """Tell the instructions with the last user's message, as Mistral's templates do."""
    system = "".join(m["content"] for m in chat if m["role"] == "system")
    told = [m for m in chat if m["role"] != "system"]
    last_user = max((n for n, m in enumerate(told) if m["role"] == "user"), default=0)
    told[last_user] = told[last_user] | {"content": system + told[last_user]["content"]}
    return told


@pytest.mark.parametrize(
    ("rewrite", "defect"),
    [
        (lambda chat: chat, ""),
        (drop_reasoning, "it drops the reasoning text of earlier turns"),
        (number_turns, "it rewrites earlier messages"),
        (forget_old, "it rewrites earlier messages"),
        (move_system, "it rewrites earlier messages"),
    ],
    ids=["append-only", "reasoning", "first message", "window", "instructions"],
)
def test_what_a_template_does_to_earlier_messages_is_found(rewrite: Rewrite, defect: str) -> None:
    assert ChatTemplate(RewritingTokenizer(rewrite)).defect == defect


async def two_steps(h: Harness, answered: str) -> tuple[LLMStepResult, str, str]:
    """Take two steps; return the second's result, the session after the first, the prompt."""
    first = await h.run(step_input(0))
    second = await h.run(step_input(1, base=first.context, text="And?"))
    tokenizer = h.engine.tokenizer
    before, after = (tokenizer.to_text(request.prompt_token_ids) for request in h.requests)
    return second, f"{before}{answered}<|im_end|>", after


@pytest.mark.parametrize(
    ("rewrite", "differs_at"),
    [(drop_reasoning, "<think>"), (number_turns, "1 messages.")],
    ids=["reasoning", "first message"],
)
async def test_divergence_is_told_with_its_position_and_the_prompt_is_the_templates(
    database: Database,
    caplog: pytest.LogCaptureFixture,
    rewrite: Rewrite,
    differs_at: str,
) -> None:
    tokenizer = RewritingTokenizer(rewrite)
    async with harness(database, respond=lambda *_: REASONED, tokenizer=tokenizer) as h:
        result, session, prompt = await two_steps(h, REASONED)
        messages = await h.contexts.load(result.context.head) if result.context else []
        chat = [{"role": m.role.value, "content": m.content} for m in messages[:-1]]
        assert prompt == tokenizer.render(chat, add_generation_prompt=True)
        assert result.diverged is not None
        assert result.diverged.base_length == len(
            ByteTokenizer().encode(session, split_special=False)
        )
        kept = ByteTokenizer().to_text(
            ByteTokenizer().encode(session, split_special=False)[: result.diverged.position]
        )
        assert session[len(kept) :].startswith(differs_at)
        assert (
            f"at token {result.diverged.position} of {result.diverged.base_length}" in caplog.text
        )
        stats = await read_stats(h)
    assert stats["divergences"] == 1
    assert stats["template_defect"]
    assert caplog.text.count("not append-only") == 1


async def test_a_turn_that_the_template_leaves_alone_goes_on_with_the_sampled_ids(
    database: Database,
) -> None:
    async with harness(database, tokenizer=RewritingTokenizer(drop_reasoning)) as h:
        result, session, prompt = await two_steps(h, "An answer.")
        assert prompt.startswith(session)
        assert result.diverged is None
        assert (await read_stats(h))["divergences"] == 0


async def test_an_append_only_template_never_diverges(database: Database) -> None:
    def answer(request: EngineRequest, _prompt: str) -> str:
        return REASONED

    async with harness(database, respond=answer) as h:
        result, session, prompt = await two_steps(h, REASONED)
        assert prompt.startswith(session)
        assert result.diverged is None
        assert (await read_stats(h))["template_defect"] == ""


async def read_stats(h: Harness) -> dict[str, object]:
    """Return what `GET /stats` says."""
    app = http_app(h.service, model="simulated", capacity=CAPACITY, metrics=CollectorRegistry())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
        stats: dict[str, object] = (await client.get("/stats")).json()
    return stats


@pytest.mark.parametrize("rewrite", [lambda chat: chat, number_turns], ids=["kept", "rewritten"])
async def test_the_scheduler_is_told_what_is_cached_of_the_prompt_itself(
    database: Database, rewrite: Rewrite
) -> None:
    schedulers: list[ScriptedScheduler] = []

    def scheduler(capacity: CapacityChanged) -> ScriptedScheduler:
        schedulers.append(ScriptedScheduler(capacity))
        return schedulers[0]

    tokenizer = RewritingTokenizer(rewrite)
    call = '{"tool":"look","arguments":{}}'
    look: JsonValue = {
        "name": "look",
        "description": "Look.",
        "arguments": {"type": "object", "properties": {}},
    }
    async with harness(
        database, tokenizer=tokenizer, respond=lambda *_: call, scheduler=scheduler
    ) as h:
        toolset = await h.contexts.put_blob([look])
        form = {"tools": ["look"], "may_answer": False}
        base, cached = None, []
        for number in range(4):
            step = step_input(number, base=base, text="Look. " * 20, toolset=toolset, output=form)
            prompt = await h.service.sessions.resolve(step, TOOLSET.validate_python({"look": look}))
            cached.append(h.engine.cache.num_cached_tokens(prompt.token_ids))
            base = (await h.run(step)).context
    told = [event.cached_tokens for event in schedulers[0].told(StepReady)]
    assert told == cached
    if rewrite is not number_turns:
        assert told[-1] is not None
        assert told[-1] >= 96
