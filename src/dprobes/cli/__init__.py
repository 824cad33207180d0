"""The command line: one module for each verb; ``main`` finds them."""
