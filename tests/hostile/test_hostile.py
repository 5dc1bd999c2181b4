from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hostile_models import ALL, Hostile, external_tensor, valid_model

from graphsurgery.errors import UsageError
from graphsurgery.model.files import SourceModel, load_model


def _listing(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of everything under a folder."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in found
    }


@pytest.mark.parametrize("hostile", ALL, ids=lambda hostile: hostile.name)
def test_refuse_in_one_line_and_write_nothing(hostile: Hostile, tmp_path: Path) -> None:
    path = hostile.build(tmp_path)
    before = _listing(tmp_path)
    with pytest.raises(UsageError) as caught:
        load_model(path)
    message = str(caught.value)
    assert hostile.message in message
    assert message.isprintable()
    assert len(message) < 900
    assert _listing(tmp_path) == before


def test_names_are_distinct_and_every_case_expects_words() -> None:
    assert len({hostile.name for hostile in ALL}) == len(ALL)
    assert all(len(hostile.message) > 2 for hostile in ALL)


def test_the_models_they_differ_from_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(16))
    path = tmp_path / "m.onnx"
    for model in (valid_model(), valid_model(initializers=[external_tensor(offset=0, length=16)])):
        path.write_bytes(model.SerializeToString())
        assert load_model(path).proto == model


@pytest.mark.parametrize("seed", range(4))
def test_mutated_bytes_give_a_model_or_one_line(seed: int) -> None:
    rng = np.random.default_rng(seed)
    raw = valid_model(initializers=[external_tensor(offset=0, length=16)]).SerializeToString()
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(250):
        data = bytearray(raw)
        for position in rng.integers(0, len(data), size=int(rng.integers(1, 4))):
            data[position] = int(rng.integers(0, 256))
        kept = bytes(data[: int(rng.integers(1, len(data) + 1))]) if rng.random() < 0.3 else bytes(data)
        try:
            assert isinstance(load_model(kept), SourceModel)
            outcomes["loaded"] += 1
        except UsageError as error:
            assert str(error).isprintable()
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20
