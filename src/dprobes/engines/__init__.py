"""
The mechanisms that place probepoints and run handlers.

An engine is a package and a row in ``engine_registry``: its capabilities, how a user asks for it, and what ``auto``,
``doctor`` and ``show`` tell about it. Nothing else imports an engine or compares the name of one. ``engine_interface``
has what they have in common; ``replay`` is the smallest one, and a model for others.

A source of DProbes C for several modules is compiled to *companions*: a program for each module, with the same
variables and tables, and minor codes of their own. All but the first, their *principal*, use the variables and tables
of that one.

The overload guard (``overload_guard``) takes hits away from probepoints that cost the machine too much.
"""
