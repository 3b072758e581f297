"""The benchmark of the loaders measures each of them."""

from experiments.bench.input import Rate, measure, table
from jaxpar.data.synthetic import SyntheticData


def test_a_loader_is_measured_by_the_tokens_it_gave():
    """Otherwise its rate would be that of padding, or of nothing."""
    rate = measure("copy", SyntheticData(50, 9, 4, "copy", train_rows=1000), seconds=0.05)
    assert rate.tokens > 0 and rate.start > 0
    assert table([Rate("copy", 0.5, 400_000)], 20_000).split("\n")[1].split() == ["copy", "0.50", "s", "400,000", "20"]
