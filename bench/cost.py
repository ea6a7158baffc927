"""Costs of real engines, as `python -m bench.calibrate` fitted them."""

from __future__ import annotations

from inference_service.engine.simulation import CostModel

CPU_SMALL = CostModel(
    step_s=0.016, prefill_token_s=0.000_9, decode_seq_s=0.001_6, kv_token_s=0.000_000_02
)
"""SmolLM2-135M with vLLM on two CPU cores."""
