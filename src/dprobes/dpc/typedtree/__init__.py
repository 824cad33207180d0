"""What is meant: the tree with types and all names resolved, and what can be known of it without a machine."""
