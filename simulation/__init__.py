"""Simulations of a partition and of a broker. Each run follows from one seed and is compared with a model. Not part of
the wheel."""
