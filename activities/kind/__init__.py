"""The kinds of tools, one module each: where a tool comes from, and how it is called."""
