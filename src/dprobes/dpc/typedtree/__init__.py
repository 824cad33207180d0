"""The typed tree, with all names resolved, and those of its properties that do not depend on the target's processor."""
