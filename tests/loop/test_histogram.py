"""Histograms of durations: buckets, sums and quantiles."""

import random

import pytest

from penstock.loop.histogram import FINE_BOUNDS, LEASE_BOUNDS, REQUEST_BOUNDS, SYNC_BOUNDS, TURN_BOUNDS, Histogram


def test_a_duration_is_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    found = Histogram((10, 20))
    for duration in (0, 10, 11, 20, 21, 1_000):
        found.add(duration)
    assert (found.counts, found.sum, found.total, found.worst) == ([2, 2, 2], 1_062, 6, 1_000)


def test_a_duration_of_several_items_counts_for_each() -> None:
    found = Histogram((10, 20))
    found.add(15, 1_000)
    assert (found.counts, found.sum) == ([0, 1_000, 0], 15_000)


def test_histograms_are_added() -> None:
    one, other = Histogram((10,)), Histogram((10,))
    one.add(5)
    other.add(50, 2)
    both = Histogram((10,)).include([one, other])
    assert (both.counts, both.sum, both.worst) == ([1, 2], 105, 50)


@pytest.mark.parametrize("bounds", [FINE_BOUNDS, REQUEST_BOUNDS, TURN_BOUNDS, SYNC_BOUNDS, LEASE_BOUNDS])
def test_bounds_ascend(bounds: tuple[int, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_the_coarse_buckets_of_requests_are_exact() -> None:
    rng = random.Random(3)
    fine, coarse = Histogram(), Histogram(REQUEST_BOUNDS)
    for _ in range(2_000):
        duration = round(10 ** rng.uniform(0, 9))
        for one in (fine, coarse):
            one.add(duration)
    for bound in REQUEST_BOUNDS:
        for one in (fine, coarse):
            one.add(bound)
            one.add(bound + 1)
    assert fine.counts_up_to(REQUEST_BOUNDS) == coarse.counts


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_a_quantile_is_right_to_within_an_eighth(share: float) -> None:
    rng = random.Random(7)
    found, durations = Histogram(), sorted(round(10 ** rng.uniform(1, 8)) for _ in range(5_000))
    for duration in durations:
        found.add(duration)
    exact = durations[round(share * len(durations)) - 1]
    assert found.quantile(share) == pytest.approx(exact, rel=0.125)


def test_quantiles_of_few_cases_do_not_exceed_the_worst() -> None:
    found = Histogram()
    assert found.quantile(0.99) == 0
    found.add(100_001)
    assert found.quantile(0.5) <= found.quantile(0.99) <= 100_001
    found.add(10**12)
    assert found.quantile(0.99) == 10**12
