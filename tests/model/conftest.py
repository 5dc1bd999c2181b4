from __future__ import annotations

from pathlib import Path

import pytest
from model_files import WEIGHTS, external_tensor, sum_model
from onnx import TensorProto, helper


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A model with its weights inside."""
    tensors = [
        helper.make_tensor(name, TensorProto.FLOAT, [8], WEIGHTS[i * 8 : i * 8 + 8]) for i, name in enumerate("abc")
    ]
    path = tmp_path / "in" / "m.onnx"
    path.parent.mkdir()
    path.write_bytes(sum_model(*tensors).SerializeToString())
    return path


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A model with three tensors in one file of a sub folder, at different offsets."""
    path = tmp_path / "split" / "m.onnx"
    (path.parent / "data").mkdir(parents=True)
    (path.parent / "data" / "w.bin").write_bytes(WEIGHTS.tobytes())
    model = sum_model(external_tensor("a", 64), external_tensor("b", 0), external_tensor("", 32))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"
