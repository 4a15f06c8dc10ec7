import pytest

from torchtitan_lite.log import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "step", "0 steps"),
        (1, "step", "1 step"),
        (20_000, "tensor", "20,000 tensors"),
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (4, "micro-batch", "4 micro-batches"),
        (1, "more file", "1 more file"),
    ],
)
def test_a_number_stands_before_the_right_form_of_its_noun(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text
