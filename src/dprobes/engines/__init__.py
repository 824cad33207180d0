"""
Engines: mechanisms that place probepoints and run handlers.

An engine is a package and a row in ``engine_registry``: its capabilities, its name for users, and its properties for
``auto``, ``doctor`` and ``show``. Nothing else imports an engine or compares the name of one. ``engine_interface`` has
the common interface; ``replay`` is the smallest engine, and a model for others.

A source of DProbes C for several modules is compiled to *companions*: a program for each module, with the same
variables and tables, and minor codes of its own. All but the first, their *principal*, use the principal's variables
and tables.

The overload guard (``overload_guard``) reduces the hits of probepoints that cost the machine too much.
"""
