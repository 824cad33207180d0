"""
Engines: mechanisms that place probepoints and run handlers.

An engine is a package and a row in ``engine_registry``: its name, its capabilities, and its properties for ``auto``,
``doctor`` and ``show``. No other code imports an engine or compares an engine's name. ``engine_interface`` has the
common interface; ``replay`` is the smallest engine, and a model for others.

A source in DProbes C for several modules is compiled to *companions*: a probe program for each module, with minor codes
of its own. They share the variables and tables of the first companion, the *principal*.

The overload guard (``overload_guard``) reduces the hits of probepoints that cost the machine too much.
"""
