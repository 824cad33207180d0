"""The client's side of the ptrace engine: the tracer process, the files that it asks about, and the sessions."""
