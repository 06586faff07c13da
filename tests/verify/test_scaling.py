"""The complexity table in exponents, and the table of five schemes."""

import pytest

from twoaxis.verify.scaling import exponents
from twoaxis.verify.schemes import cells


def test_counted_work_grows_as_the_paper_says():
    fits = exponents()
    found = {(fit.work, fit.size): fit.counted for fit in fits}
    assert [fit for fit in fits if not fit.passed] == []
    assert found["[short_swa, attention, mlp]: scores and values", "T"] > 1.98
    assert found["[short_swa, mlp]: scores and values", "T"] < 1.01


@pytest.mark.full
def test_the_verdicts_on_the_five_schemes():
    wrong = {(cell.scheme, cell.column) for cell in cells() if not cell.right}
    assert wrong == {
        ("ELC-BERT", "compute of a layer"),  # all earlier layers are read
        ("depth attention", "memory"),  # a window of K keeps K states
        ("ELC-BERT", "parallelism"),
        ("DenseFormer", "parallelism"),
        ("depth attention", "parallelism"),
    }
