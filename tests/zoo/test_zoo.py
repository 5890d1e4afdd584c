"""The zoo is complete: every denoiser class of diffusers is built, or its failure named."""

import importlib
import inspect
import pkgutil

import pytest
from diffusers.models import controlnets, transformers, unets
from diffusers.models.modeling_utils import ModelMixin

from tests.zoo import CASES, in_double


def denoiser_classes() -> set[str]:
    """Names of all models defined in the three packages that hold denoisers."""
    return {
        name
        for package in (transformers, unets, controlnets)
        for entry in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
        for name, value in vars(importlib.import_module(entry.name)).items()
        if inspect.isclass(value) and issubclass(value, ModelMixin)
        if value.__module__ == entry.name
    }


def test_every_denoiser_class_has_a_case():
    assert denoiser_classes() - {case.class_name for case in CASES.values()} == set()


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.reason])
def test_a_class_left_out_fails_for_the_reason_given(name):
    with in_double():
        root, batch = CASES[name].build()
        with pytest.raises(Exception, match=CASES[name].error):
            root.training_step(batch, 0).backward()
