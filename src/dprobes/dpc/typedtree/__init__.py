"""The typed tree, with all names resolved, and the properties of it that do not depend on a machine."""
