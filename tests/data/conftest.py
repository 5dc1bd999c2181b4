from __future__ import annotations

import numpy as np
import pytest

from graphsurgery.data import InputSpec


@pytest.fixture
def specs() -> tuple[InputSpec, ...]:
    """Token ids and a float with one static axis; a default for the last input."""
    return (
        InputSpec("input_ids", np.dtype(np.int64), ("batch", "seq"), optional=False),
        InputSpec("attention_mask", np.dtype(np.float32), ("batch", "seq"), optional=False),
        InputSpec("state", np.dtype(np.float32), ("batch", 4), optional=False),
        InputSpec("scale", np.dtype(np.float32), (1,), optional=True),
    )
