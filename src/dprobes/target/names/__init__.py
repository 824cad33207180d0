"""Names of functions, modules and places, as linkers and people write them."""
