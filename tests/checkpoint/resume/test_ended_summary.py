"""What a run that had ended says of itself: where its last step is, and how to train on."""

from __future__ import annotations

import pytest

from torchtitan_lite.checkpoint.resume.ending import Ended


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        (3, "step 5 is in a and b, beyond --training.steps=3. To continue, raise --training.steps above 5."),
        (5, "step 5"),
    ],
)
def test_a_run_that_is_beyond_its_steps_says_how_to_continue(steps: int, text: str) -> None:
    assert Ended(5, ("a",)).also_in("b").summary(steps).startswith(text)  # type: ignore[arg-type]  # shown as text
