"""The GPU inference service: takes LLM steps from Temporal, batches ready cohorts, feeds the engine."""
