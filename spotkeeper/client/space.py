"""Draws the values of a search's trials. Pure.

Each value comes from a number in [0, 1) that depends only on the seed, the parameter's name and the place in the
sequence. So the same seed gives the same values, ``extend`` goes on where the sequence stopped, and with ``random`` a
further parameter changes no value of another.

Sobol's sequence has the direction numbers of S. Joe and F. Y. Kuo (new-joe-kuo-6.21201, "Constructing Sobol sequences
with better two-dimensional projections", SIAM J. Sci. Comput. 30, 2008), and the linear matrix scramble and digital
shift of J. Matousek ("On the L2-discrepancy for anchored boxes", J. Complexity 14, 1998), as in SciPy and PyTorch. It
is written out here because the command does not depend on either of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cache
from random import Random

from spotkeeper.contract.sweep import Params
from spotkeeper.contract.sweepfile import Dimension, SweepFile, Value

BITS = 30
DIGITS = 10  # significant, of a drawn number
# Of dimensions 2 to 21: degree of the primitive polynomial, its inner coefficients, the first direction integers.
_JOE_KUO: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (1, 0, (1,)),
    (2, 1, (1, 3)),
    (3, 1, (1, 3, 1)),
    (3, 2, (1, 1, 1)),
    (4, 1, (1, 1, 3, 3)),
    (4, 4, (1, 3, 5, 13)),
    (5, 2, (1, 1, 5, 5, 17)),
    (5, 4, (1, 1, 5, 5, 5)),
    (5, 7, (1, 1, 7, 11, 19)),
    (5, 11, (1, 1, 5, 1, 1)),
    (5, 13, (1, 1, 1, 3, 11)),
    (5, 14, (1, 3, 5, 5, 31)),
    (6, 1, (1, 3, 3, 9, 7, 49)),
    (6, 13, (1, 1, 1, 15, 21, 21)),
    (6, 16, (1, 3, 1, 13, 27, 49)),
    (6, 19, (1, 1, 1, 15, 7, 5)),
    (6, 22, (1, 3, 1, 15, 13, 25)),
    (6, 25, (1, 1, 5, 5, 19, 61)),
    (7, 1, (1, 3, 7, 11, 23, 15, 103)),
    (7, 4, (1, 3, 7, 13, 13, 15, 69)),
)


def values_of(file: SweepFile, seed: int, drawn: int, count: int) -> tuple[Params, ...]:
    """Return the values of ``count`` trials, after the first ``drawn`` of the sampler's sequence."""
    if file.sampler == "grid":
        return grid(file.space)[drawn : drawn + count]
    names = sorted(file.space)
    found = []
    for index in range(drawn, drawn + count):
        if file.sampler == "sobol":
            units = {name: sobol(index, at, f"{seed}/{name}") for at, name in enumerate(names)}
        else:
            units = {name: Random(f"{seed}/{name}/{index}").random() for name in names}  # noqa: S311 - no secret
        found.append(_applying(file.space, {name: value_at(file.space[name], units[name]) for name in names}))
    return tuple(found)


def value_at(dimension: Dimension, unit: float) -> Value:
    """Return the value of a dimension at ``unit`` in [0, 1)."""
    if dimension.choice is not None:
        return dimension.choice[int(unit * len(dimension.choice))]
    if dimension.integers is not None:
        low, high = dimension.integers
        return min(high, low + int(unit * (high - low + 1)))
    return _between(dimension, unit)


def _between(dimension: Dimension, unit: float) -> float:
    """Return the number of a ``uniform`` or ``loguniform`` dimension at ``unit`` in [0, 1]."""
    if dimension.uniform is not None:
        low, high = dimension.uniform
        value = low + unit * (high - low)
    else:
        assert dimension.loguniform is not None
        low, high = dimension.loguniform
        value = math.exp(math.log(low) + unit * (math.log(high) - math.log(low)))
    return min(max(float(f"{value:.{DIGITS}g}"), float(low)), float(high))


def grid(space: Mapping[str, Dimension]) -> tuple[Params, ...]:
    """Return every combination once: the last parameter of the file changes fastest."""
    names, found = list(space), []
    for combination in itertools.product(*(_points(space[name]) for name in names)):
        values = _applying(space, dict(zip(names, combination, strict=True)))
        key = [(name, isinstance(value, bool), value) for name, value in values.items()]
        found.append((tuple(key), values))
    return tuple(dict(found).values())


def _points(dimension: Dimension) -> tuple[Value, ...]:
    if dimension.choice is not None:
        return dimension.choice
    if dimension.integers is not None:
        low, high = dimension.integers
        count = dimension.points or high - low + 1
        return tuple(low + round(index * (high - low) / max(1, count - 1)) for index in range(count))
    count = dimension.points or 2
    return tuple(_between(dimension, index / (count - 1)) for index in range(count))


def _applying(space: Mapping[str, Dimension], values: Params) -> Params:
    """Return the values of the parameters whose conditions hold, in the order of the file."""
    kept = values
    for _ in space:  # a parameter that goes may take others with it
        less = {name: kept[name] for name in space if name in kept and space[name].applies(kept)}
        if len(less) == len(kept):
            return less
        kept = less
    return kept


# -- Sobol's sequence


def sobol(index: int, dimension: int, scramble: str = "") -> float:
    """Return one coordinate of a point of the sequence, in [0, 1).

    Args:
        index: of the point, from 0; below 2**30.
        dimension: from 0 to 20.
        scramble: seed of the scramble; "": none.
    """
    directions = _scrambled(dimension, scramble) if scramble else (_directions(dimension), 0)
    point, gray = directions[1], index ^ (index >> 1)
    for bit, direction in enumerate(directions[0]):
        if gray >> bit & 1:
            point ^= direction
    return point / (1 << BITS)


@cache
def _directions(dimension: int) -> tuple[int, ...]:
    """Return a dimension's direction numbers, as fractions of 2**30."""
    if not dimension:
        return tuple(1 << (BITS - 1 - bit) for bit in range(BITS))
    degree, inner, first = _JOE_KUO[dimension - 1]
    found = [number << (BITS - 1 - bit) for bit, number in enumerate(first)]
    for bit in range(degree, BITS):
        number = found[bit - degree] ^ (found[bit - degree] >> degree)
        for back in range(1, degree):
            if inner >> (degree - 1 - back) & 1:
                number ^= found[bit - back]
        found.append(number)
    return tuple(found)


@cache
def _scrambled(dimension: int, scramble: str) -> tuple[tuple[int, ...], int]:
    """Return direction numbers after a random lower triangular matrix, and a random shift."""
    random = Random(f"sobol/{scramble}")  # noqa: S311 - no secret
    # Row r gives bit r, from the highest; it takes that bit, and any of the bits above.
    rows = [1 << (BITS - 1 - row) | random.getrandbits(BITS) >> (BITS - row) << (BITS - row) for row in range(BITS)]
    shift = random.getrandbits(BITS)

    def product(number: int) -> int:
        return sum(((row & number).bit_count() & 1) << (BITS - 1 - at) for at, row in enumerate(rows))

    return tuple(product(number) for number in _directions(dimension)), shift
