"""A plan counts what its tasks do, one after the other."""

import pytest

from dap.ray.search_plan import SearchPlan


@pytest.mark.parametrize("index", [None, "IVF64,Flat:nprobe=8"])
def test_operations_are_those_of_a_loop_over_tiles(index: str | None) -> None:
    plan = SearchPlan(100_000, 50_000, 16, "CPU", 3, index=index)
    rows, columns = (
        [min(most, side - start) for start in range(0, side, most)]
        for side, most in zip((100_000, 50_000), plan.tile, strict=True)
    )
    assert plan.tasks == len(rows) * len(columns)
    flops = 0.0
    if index:
        for strip in (*rows, *columns):
            flops += (
                2 * 16 * 64 * (10 * min(256 * 64, strip) + strip)
            )  # ten rounds of training, then all are added
    for queries in rows:
        for keys in columns:
            if index:
                flops += 2 * 16 * (queries * (64 + keys * 8 / 64) + keys * (64 + queries * 8 / 64))
            else:
                flops += 2 * 16 * queries * keys
    assert plan.flops == pytest.approx(flops, rel=1e-3)
