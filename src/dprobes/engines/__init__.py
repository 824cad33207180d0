"""The mechanisms that place probepoints and run handlers; ``base`` is what they have in common."""
