"""A tool module that raises, when it is imported, what would end an event loop."""

raise KeyboardInterrupt
