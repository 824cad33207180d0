"""One module for each verb of the command line; ``cli.main`` finds them."""
