"""PostgreSQL: conversations by content, ledgers of LLM steps and tool calls, migrations."""
