"""A tokenizer without files or dependencies: one token per UTF-8 byte, ChatML-like template."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

NUM_BYTES = 256


class ByteTokenizer:
    """Ids 0 to 255 are bytes; the ids after them are the two control tokens of ChatML.

    The template is append-only: the rendering of a conversation starts with that of its beginning.
    """

    special_tokens: tuple[str, ...] = (TURN_START, TURN_END)
    eos_token_id: int = NUM_BYTES + special_tokens.index(TURN_END)
    vocab_size: int = NUM_BYTES + len(special_tokens)

    def __init__(self) -> None:
        self.digest = hashlib.sha256(b"byte-chatml-1").hexdigest()
        self._control = re.compile("(" + "|".join(map(re.escape, self.special_tokens)) + ")")

    def render(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Render messages as ChatML, each closed by the end-of-turn token and a line break."""
        turns = [f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages]
        if add_generation_prompt:
            turns.append(f"{TURN_START}assistant\n")
        return "".join(turns)

    def encode(self, text: str, *, split_special: bool) -> list[int]:
        """Return one id per byte; control texts become one id each unless `split_special`."""
        if split_special or TURN_START[:2] not in text:
            return list(text.encode())
        ids: list[int] = []
        for part in self._control.split(text):
            if part in self.special_tokens:
                ids.append(NUM_BYTES + self.special_tokens.index(part))
            else:
                ids.extend(part.encode())
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become replacement characters."""
        try:
            data = bytes(token_ids)
        except ValueError:
            data = bytes(token for token in token_ids if token < NUM_BYTES)
        return data.decode(errors="replace")

    def to_text(self, token_ids: Sequence[int]) -> str:
        """Return the text, with that of control tokens."""
        return b"".join(
            bytes((token,))
            if token < NUM_BYTES
            else self.special_tokens[token - NUM_BYTES].encode()
            for token in token_ids
        ).decode(errors="replace")
