"""Token-exact sessions: the prompt of a step, as token ids, without tokenising anything twice.

Theory of operation. A session's ids only ever grow: the ids of the last step's prompt, the ids
sampled in answer to it, then the ids of the new messages. The new messages' ids are the suffix of
a two-render difference: a short made-up conversation is rendered with and without them, and what
the longer text adds, from just behind the assistant's end of turn on, is tokenised. The cost of a
step is so that of its new messages. This needs a chat template that is append-only, which is
checked when the service starts (`template.py`). With any other template the whole conversation is
rendered again: where its text is still that of the session, the session's ids go on; where not, the
new render is the prompt, and the step tells at which token it left the session.

A session lives in memory under its token run, the id of the step that ended it. When it is not
there (first step, restart, another replica) it comes from the store: the token run's ids. Where
another model has made that run, the session goes on from the last run of this one that the
conversation holds; without any, the messages are rendered whole.

A message that refers to a text in the store is read whole: its preview is for people.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from contracts.error import BadInputError
from contracts.llm_step import Divergence, LLMStepInput
from contracts.message import ContextRef, Message
from inference_service.engine.protocol import ChatTokenizer
from inference_service.prompt import ChatMessage, Toolset, chat_messages
from inference_service.scheduler.event import Node
from inference_service.template import ChatTemplate
from store.context import ContextStore, NotStoredError

log = logging.getLogger(__name__)

_MAX_OPENINGS = 1_024
"""Opening conversations kept in memory: each agent has one, however many jobs it has."""
_MAX_INLINE_CHARACTERS = 8_192
"""Texts up to this length are tokenised at once; longer ones in a thread, off the event loop."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of one step. `token_ids[:base_length]` is the token run `parent`, unchanged.

    `kept` is how many of its first tokens are those of the step's base in this place: all of the
    base's, unless the prompt `diverged` from it. `opening` is the part that every prompt
    with this opening conversation begins with; a later step of a session has none.
    """

    token_ids: array[int]
    base_length: int
    parent: str | None
    kept: int = 0
    opening: Node | None = None
    diverged: Divergence | None = None


class Sessions:
    """Resolves contexts to token ids; keeps up to `max_tokens` ids of live sessions in memory."""

    def __init__(
        self, tokenizer: ChatTokenizer, contexts: ContextStore, *, max_tokens: int = 8_000_000
    ) -> None:
        self._tokenizer = tokenizer
        self._contexts = contexts
        self._max_tokens = max_tokens
        self._live: OrderedDict[str, array[int]] = OrderedDict()
        self._live_tokens = 0
        self._openings: OrderedDict[str, list[Message]] = OrderedDict()
        self._opening_ids: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._template = ChatTemplate(tokenizer)
        self.divergences = 0
        """Prompts that differed from their session, since the start."""
        if self.template_defect:
            log.warning(
                "the chat template is not append-only: %s; each step renders its whole prompt",
                self.template_defect,
            )

    @property
    def template_defect(self) -> str:
        """In what way the chat template is not append-only; empty if it is."""
        return self._template.defect

    @property
    def live_tokens(self) -> int:
        """Token ids held in memory."""
        return self._live_tokens

    async def resolve(self, step: LLMStepInput, toolset: Toolset) -> Prompt:
        """Return the step's prompt. Raises `NotStoredError` if the store lacks a part of it."""
        run = step.base.token_run if step.base else None
        base = await self._base(run) if run else None
        if self.template_defect:
            return await self._rendered_whole(step, toolset, base)
        if base is None and (resumed := await self._resumed(step)):
            return resumed
        if base is None:
            return await self._rendered_whole(step, toolset, base)
        return Prompt(base + await self._added(step.append), len(base), run, kept=len(base))

    def keep(self, run: str, token_ids: array[int], *, parent: str | None) -> None:
        """Keep the ids of the session that ends in step `run`, in place of its `parent`'s."""
        if parent is not None and parent in self._live:
            self._live_tokens -= len(self._live.pop(parent))
        self._live[run] = token_ids
        self._live_tokens += len(token_ids)
        while self._live_tokens > self._max_tokens and len(self._live) > 1:
            _, dropped = self._live.popitem(last=False)
            self._live_tokens -= len(dropped)

    async def _base(self, run: str) -> array[int] | None:
        if live := self._live.get(run):
            self._live.move_to_end(run)
            return live
        stored = await self._contexts.load_token_run(run, self._tokenizer.digest)
        return None if stored is None else array("i", stored)

    async def _resumed(self, step: LLMStepInput) -> Prompt | None:
        """Return the prompt behind the last run that this model has in the step's conversation."""
        if step.base is None or step.base.token_run is None:
            return None
        nodes = await self._contexts.load_nodes(step.base.head)
        heads = [node.hash for node in nodes]
        found = await self._contexts.last_run(step.job_id, heads, self._tokenizer.digest)
        base = await self._base(found.run) if found else None
        if found is None or base is None:
            return None
        later = [Message.model_validate_json(node.body) for node in nodes[found.length :]]
        ids = base + await self._added([*later, *step.append])
        return Prompt(ids, len(base), found.run, kept=len(base))

    async def _added(self, messages: Sequence[Message]) -> array[int]:
        """Return the ids that messages add behind an assistant's end of turn."""
        return await self._encode(await self._chat(messages, {}), is_added=True)

    async def _rendered_whole(
        self, step: LLMStepInput, toolset: Toolset, base: array[int] | None
    ) -> Prompt:
        messages = [*await self._messages(step.base), *step.append]
        chat = await self._chat(messages, toolset)
        if base is not None and self._template.can_add:
            ids = base + await self._added(step.append)
            if await asyncio.to_thread(self._has_text, ids, chat):
                assert step.base is not None
                return Prompt(ids, len(base), step.base.token_run, kept=len(base))
        ids = await self._encode(chat)
        if step.base is not None and step.base.token_run is None:
            return Prompt(ids, 0, None, opening=await self._opening(step, toolset, ids))
        if base is None:
            return Prompt(ids, 0, None)
        diverged = Divergence(position=_divergence(base, ids), base_length=len(base))
        self.divergences += 1
        log.warning(
            "step %s: the prompt differs from its session at token %d of %d",
            step.step_id, diverged.position, diverged.base_length,
        )  # fmt: skip
        return Prompt(ids, 0, None, kept=diverged.position, diverged=diverged)

    def _has_text(self, ids: array[int], chat: list[ChatMessage]) -> bool:
        """Tell whether ids are the whole conversation, whatever ids its answers were sampled as."""
        return self._tokenizer.to_text(ids.tolist()) == self._template.text(chat)

    async def _opening(self, step: LLMStepInput, toolset: Toolset, ids: array[int]) -> Node | None:
        """Return what the prompt shares with all others of its opening conversation and tools."""
        assert step.base is not None
        key = (step.base.head, step.toolset or "")
        if key not in self._opening_ids:
            opening = await self._messages(step.base)
            chat = await self._chat(opening, toolset)
            self._opening_ids[key] = await self._encode(chat, add_generation_prompt=False)
            if len(self._opening_ids) > _MAX_OPENINGS:
                self._opening_ids.popitem(last=False)
        else:
            self._opening_ids.move_to_end(key)
        length = min(_divergence(self._opening_ids[key], ids), len(ids) - 1)
        return Node(f"{key[0][:16]}.{key[1][:16]}.{length}", length) if length else None

    async def _messages(self, base: ContextRef | None) -> list[Message]:
        if base is None:
            return []
        if known := self._openings.get(base.head):
            self._openings.move_to_end(base.head)
            return known
        messages = await self._contexts.load(base.head)
        if base.token_run is None:
            self._openings[base.head] = messages
            if len(self._openings) > _MAX_OPENINGS:
                self._openings.popitem(last=False)
        return messages

    async def _chat(self, messages: Sequence[Message], toolset: Toolset) -> list[ChatMessage]:
        """Return the chat template's input; texts in the store stand in place of previews."""
        whole = [await self._whole(message) if message.blob else message for message in messages]
        return chat_messages(
            whole,
            toolset,
            has_tool_role=self._template.has_tool_role,
            must_alternate=self._template.must_alternate,
        )

    async def _whole(self, message: Message) -> Message:
        assert message.blob is not None
        digest = message.blob.digest
        try:
            text = await self._contexts.get_blob(digest)
        except NotStoredError as error:
            raise NotStoredError(
                f"the result of tool {message.tool!r} (call {message.tool_call_id!r}, "
                f"{message.blob.bytes:,} bytes, blob {digest!r}) is not in the store",
                hint=error.hint,
            ) from error
        if not isinstance(text, str):
            raise BadInputError(f"blob {digest!r} is no text, so it cannot be a tool's result")
        return message.model_copy(update={"content": text, "blob": None})

    async def _encode(
        self,
        chat: list[ChatMessage],
        *,
        is_added: bool = False,
        add_generation_prompt: bool = True,
    ) -> array[int]:
        def encode() -> array[int]:
            return self._template.encode(
                chat, is_added=is_added, add_generation_prompt=add_generation_prompt
            )

        size = sum(len(message["content"]) for message in chat)
        return encode() if size <= _MAX_INLINE_CHARACTERS else await asyncio.to_thread(encode)


def _divergence(base: Sequence[int], ids: Sequence[int]) -> int:
    for position, (old, new) in enumerate(zip(base, ids, strict=False)):
        if old != new:
            return position
    return min(len(base), len(ids))
