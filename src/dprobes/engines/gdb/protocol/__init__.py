"""GDB's remote serial protocol: packets, a conversation in them, and questions with their answers."""
