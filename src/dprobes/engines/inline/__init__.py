"""The inline engine: handlers run as machine code in the probed process, for the price of a function call."""
