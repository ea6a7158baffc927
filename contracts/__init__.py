"""Plain data that crosses a process border: jobs, agents, LLM steps, tool calls and their names.

Nothing here imports the rest of the project, so every process can share it.
"""
