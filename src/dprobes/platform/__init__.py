"""The machine that engines work on: Linux's interfaces, processors' code, core dumps, programs of other processors."""
