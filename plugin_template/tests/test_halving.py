from dsx_example.halving import Halving

from dsx.contracts import Hyper
from dsx.testing import check_plugin


def test_keeps_its_contract() -> None:
    check_plugin("halving", options={"every": 2})


def test_rate() -> None:
    rates = [Halving(2).at(step, {"all": Hyper(lr=1.0)})["all"].lr for step in (1, 2, 3, 5)]
    assert rates == [1.0, 1.0, 0.5, 0.25]
