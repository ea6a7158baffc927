"""A shop's orders behind an MCP server, and an agent that asks it."""
