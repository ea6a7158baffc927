"""The served model's own tokenizer and chat template, through transformers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from contracts.error import BadInputError

PROBE = "muster"
"""Content of the messages that show where the template ends an assistant's turn."""


class TransformersTokenizer:
    """Tokenizer and chat template of a checkpoint directory, for any model with a fast tokenizer.

    Control tokens are the special tokens, and those added tokens that the chat template writes
    itself (`<tool_call>`, `<think>`): text that looks like one stays text under `split_special`.
    """

    def __init__(self, path: Path) -> None:
        """Load from `path`; raises BadInputError if it has no fast tokenizer or chat template."""
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"the tokenizer of the model at {str(path)!r} does not load: {error}",
                hint="the directory needs the model's tokenizer files (tokenizer.json)",
            ) from error
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        template = tokenizer.chat_template
        if backend is None or not isinstance(template, str):
            missing = "fast tokenizer (tokenizer.json)" if backend is None else "chat template"
            raise BadInputError(
                f"the model at {str(path)!r} has no {missing}", hint="serve an instruct model"
            )
        serialized = backend.to_str()
        self._hf = tokenizer
        self._plain = backend
        self._split = Tokenizer.from_str(serialized)
        self._split.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        control = {i: t.content for i, t in added.items() if t.special or t.content in template}
        self._control_ids = frozenset(i for i, text in control.items() if text.strip())
        self.special_tokens: tuple[str, ...] = tuple(control[i] for i in sorted(self._control_ids))
        self._control = _any_of(self.special_tokens)
        self.digest = hashlib.sha256(f"{serialized}\0{template}".encode()).hexdigest()
        self.eos_token_id: int = self._end_of_turn()

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Render with the chat template; raises BadInputError where the template refuses."""
        from jinja2 import TemplateError

        try:
            rendered: str = self._hf.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise BadInputError(
                f"the model's chat template refuses this conversation: {error} (roles: {roles!r})",
                hint="some models take no system or tool messages; serve another model",
            ) from error
        return rendered

    def encode(self, text: str, *, split_special: bool) -> list[int]:
        """Return token ids; no BOS or EOS is added. `split_special` keeps control text inert."""
        if not split_special:
            return self._plain.encode(text, add_special_tokens=False).ids
        ids: list[int] = self._split.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        ids = [
            token
            for part in self._torn(text)
            for token in self._split.encode(part, add_special_tokens=False).ids
        ]
        assert self._control_ids.isdisjoint(ids), "text must not become a control token"
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self._plain.decode(list(token_ids), skip_special_tokens=True)

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens included."""
        return self._plain.decode(list(token_ids), skip_special_tokens=False)

    def _torn(self, text: str) -> Iterable[str]:
        """Cut a text inside each control text, after its first character."""
        start = 0
        for match in self._control.finditer(text):
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]

    def _end_of_turn(self) -> int:
        """Return the control token that the template writes after an assistant's words."""
        turns = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}]
        rendered = self.render(turns, add_generation_prompt=False)
        after = rendered[rendered.rindex(PROBE) + len(PROBE) :]
        ends = [i for i in self.encode(after, split_special=False) if i in self._control_ids]
        return ends[0] if ends else self._hf.eos_token_id


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
