"""The instruction under a breakpoint behind a stub: carried out here where its effect is known, or stepped there."""
