"""What the parsers of languages like C share: tokens, and a walk through them."""
