"""How Spark reaches a broker: which implementation of the interface (home.py) a target has.

Owns: `reading` and `writing`. A directory is the one home so far.
"""

from penstock.spark.directory import DirectoryReading
from penstock.spark.home import Reading, Target, Writing
from penstock.spark.outgoing import DirectoryWriting


def reading(target: Target) -> Reading:
    """A broker to be read, wherever this runs. Close it."""
    return DirectoryReading(target)


def writing(target: Target) -> Writing:
    """A broker to be written to, wherever this runs. Close it."""
    return DirectoryWriting(target)
