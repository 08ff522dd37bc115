"""The version of Penstock.

Owns: `__version__`, from which the package is built.
"""

__version__ = "0.1.0.dev0"
