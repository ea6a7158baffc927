"""A payment service as a tool: slow, and it honours the idempotency key it is handed.

Each charge is one file, created exclusively; every attempt leaves a line, so that a test can tell
how often it was asked and how often it charged.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from uuid import uuid4


def pay(reason: str, idempotency_key: str) -> str:
    """Pay a fixed amount.

    Args:
        reason: What the payment is for.
    """
    ledger = Path(os.environ["TEST_PAYMENT_DIR"])
    charge = ledger / idempotency_key.replace("/", "_")
    with (ledger / "attempts.log").open("a") as attempts:
        attempts.write(f"{idempotency_key}\n")
    draft = ledger / f"draft-{uuid4().hex}"
    draft.write_text(reason)
    with contextlib.suppress(FileExistsError):
        # Whole or not at all: the file appears under the key with its content, once.
        os.link(draft, charge)
        time.sleep(0.3)
    draft.unlink()
    return f"paid: {charge.read_text()}"
