"""The client's side of the ptrace engine: the link to the tracer, the sites in files, and the programs of sessions."""
