"""The GPU inference service: LLM steps from Temporal, in ready cohorts, to the engine."""
