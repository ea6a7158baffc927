"""The tool that pays: it asks the payment server, under the key that it is handed."""

from __future__ import annotations

import os

import httpx

SERVER = "BENCH_PAYMENT_URL"
"""Environment variable with the payment server's address."""

HOLD_S = 0.4
"""How long the server holds its answer back."""


def charge(amount: int, idempotency_key: str) -> str:
    """Charge an amount.

    Args:
        amount: How much, in cents.
    """
    answer = httpx.post(
        f"{os.environ[SERVER]}/charge",
        headers={"Idempotency-Key": idempotency_key},
        json={"amount": amount, "hold_s": HOLD_S},
        timeout=30.0,
        trust_env=False,
    )
    answer.raise_for_status()
    return f"charged {answer.json()['charged']}"
