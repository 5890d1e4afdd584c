import weakref

import pytest
import torch

from lightning_diffpipe.errors import ConfigurationError, clear_variables, require_number


def fail(seen):
    activations = torch.zeros(1)
    seen.append(weakref.ref(activations))
    raise RuntimeError("out of memory")


def fail_while_handling(seen, explicit):
    try:
        fail(seen)
    except RuntimeError as error:
        fail_again(seen, error if explicit else None)


def fail_again(seen, cause):
    gradients = torch.zeros(1)
    seen.append(weakref.ref(gradients))
    if cause is not None:
        raise ValueError("the step failed") from cause
    raise ValueError("the step failed")


@pytest.mark.parametrize("explicit", [True, False], ids=["cause", "context"])
def test_tensors_of_an_error_and_of_the_one_that_led_to_it_are_freed(explicit):
    seen = []
    with pytest.raises(ValueError, match="the step failed") as raised:
        fail_while_handling(seen, explicit)
    assert all(reference() is not None for reference in seen), "a traceback keeps variables alive"
    clear_variables(raised.value)
    assert all(reference() is None for reference in seen)
    assert raised.value.__traceback__ is not None


@pytest.mark.parametrize(
    "value", [pytest.param(10**400, id="huge"), float("nan"), float("-inf"), True, "2"]
)
def test_what_is_no_number_in_its_range_is_refused(value):
    # History: of an integer of 310 digits or more came an OverflowError.
    with pytest.raises(ConfigurationError, match="share must be a number > 0 and <= 1; got"):
        require_number("share", value, above=0, most=1)
