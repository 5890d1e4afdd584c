"""Rows of parametrised tests, of which `make test` runs some and `make test-tables` the others."""

from typing import Any

import pytest


def row(*values: Any) -> Any:
    """A row that is left to `make test-tables`: those that stay take each of its paths, if not together."""
    return pytest.param(*values, marks=pytest.mark.table)
