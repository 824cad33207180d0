"""Knowledge about x86 that engines share: how instructions are emulated, relocated and stepped, and debug registers."""
