"""One module for each verb of the command line; ``cli.command_group`` imports them."""
