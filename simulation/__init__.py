"""Simulations of a partition and of a whole broker, each run from one seed beside a model. They belong to the tests, not to the wheel."""
