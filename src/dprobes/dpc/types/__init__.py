"""Types of C, the output formats of their values, and the places where functions pass them."""
