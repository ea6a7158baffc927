"""What people touch: the command line, the embedded stack, job client and reports."""
