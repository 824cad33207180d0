"""Typed tree, with all names resolved, and its properties that do not depend on the target's processor."""
