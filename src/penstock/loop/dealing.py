"""Fair shares: who gets how many of what there is.

Owns: `shares`, which deals items out as cards are dealt: one each in turn, until everybody has enough or nothing is left.
23 items over wants of 20, 6 and 1 give 16, 6 and 1.
"""

from collections.abc import Sequence


def shares(wants: Sequence[int], there: int) -> list[int]:
    """How many each gets of `there` items; what does not divide evenly goes to those who came first."""
    given = [0] * len(wants)
    open_ones = [index for index, want in enumerate(wants) if want > 0]
    while open_ones and there > 0:
        each = min(there // len(open_ones), min(wants[index] - given[index] for index in open_ones))
        if each == 0:
            for index in open_ones[:there]:
                given[index] += 1
            return given
        for index in open_ones:
            given[index] += each
        there -= each * len(open_ones)
        open_ones = [index for index in open_ones if given[index] < wants[index]]
    return given
