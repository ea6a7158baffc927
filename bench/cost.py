"""Costs of real engines, as `python -m bench.calibrate` fitted them."""

from __future__ import annotations

from inference_service.engine.simulation import CostModel

CPU_SMALL = CostModel(
    step_s=0.035,
    prefill_token_s=0.002_7,
    decode_seq_s=0.003_2,
    kv_token_s=0.000_003_3,
    prefill_pair_s=0.000_000_86,
)
"""SmolLM2-135M with vLLM 0.32 on two shared CPU cores, November 2026.

Two fits, the fastest of 3 and of 2 repeats for each of 29 points, agree within 5% (but 25% in
`kv_token_s`); their errors are 2 to 3% at the median and 11% at worst. A closed loop of 8 sessions
takes 5% less time than on vLLM with room for all, 1% less with room for half, and finds the same
share of its prompts cached within 0.1 points. Another machine, and another day, is another scale.
"""
