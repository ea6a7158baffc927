"""MCP servers: how they are reached, kept between calls, and understood."""
