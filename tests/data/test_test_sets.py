from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from sample_files import Sample, assert_same, refusal, sample

from graphsurgery.data import InputSpec, open_samples

Specs = tuple[InputSpec, ...]


def test_set(folder: Path, arrays: Sample, *, named: bool = False) -> Path:
    folder.mkdir(parents=True)
    for index, (name, array) in enumerate(arrays.items()):
        tensor = numpy_helper.from_array(array, name if named else "")
        (folder / f"input_{index}.pb").write_bytes(tensor.SerializeToString())
    (folder / "output_0.pb").write_bytes(b"never read")
    return folder


test_set.__test__ = False  # type: ignore[attr-defined]


def test_one_set_in_graph_order(specs: Specs, tmp_path: Path) -> None:
    samples = open_samples(test_set(tmp_path / "test_data_set_0", sample()), specs)
    assert_same(samples[0], sample())
    assert samples.sha256 == open_samples([sample()], specs).sha256


def test_parent_folder_in_natural_order(specs: Specs, tmp_path: Path) -> None:
    for index in (0, 2, 10):
        test_set(tmp_path / f"test_data_set_{index}", sample(index))
    (tmp_path / "model.onnx").write_bytes(b"the model lies beside its data")
    samples = open_samples([tmp_path], specs)
    for got, index in zip(samples, (0, 2, 10), strict=True):
        assert_same(got, sample(index))
    assert samples.sources == ("test sets, 3 samples",)


def test_names_win_over_the_order(specs: Specs, tmp_path: Path) -> None:
    shuffled = dict(reversed(sample().items()))
    assert_same(open_samples(test_set(tmp_path / "set", shuffled, named=True), specs)[0], sample())


def test_all_inputs_given_includes_those_with_a_default(specs: Specs, tmp_path: Path) -> None:
    full = {**sample(), "scale": np.ones(1, np.float32)}
    assert_same(open_samples(test_set(tmp_path / "set", full), specs)[0], full)


def test_wrong_tensor_names_the_input_and_the_set(specs: Specs, tmp_path: Path) -> None:
    bad = sample()
    bad["state"] = bad["state"][:, :3]
    folder = test_set(tmp_path / "set", bad)
    assert f"{folder}: input 'state' has shape [2, 3], the model takes float32[batch,4]" in refusal(folder, specs)


def test_too_few_and_too_many(specs: Specs, tmp_path: Path) -> None:
    few = test_set(tmp_path / "few", {"input_ids": sample()["input_ids"]})
    assert "input 'attention_mask' (float32[batch,seq]) is missing" in refusal(few, specs)
    many = test_set(tmp_path / "many", {str(index): np.zeros(1, np.float32) for index in range(5)})
    assert f"{many}/input_4.pb: the model has only 4 inputs; remove this file" in refusal(many, specs)


def test_same_input_twice(specs: Specs, tmp_path: Path) -> None:
    folder = test_set(tmp_path / "set", sample())
    tensor = numpy_helper.from_array(sample()["input_ids"], "input_ids")
    (folder / "input_1.pb").write_bytes(tensor.SerializeToString())
    assert "input_1.pb: input 'input_ids' is given twice" in refusal(folder, specs)


def test_set_without_inputs(specs: Specs, tmp_path: Path) -> None:
    test_set(tmp_path / "test_data_set_0", sample())
    (tmp_path / "test_data_set_1").mkdir()
    assert f"data folder '{tmp_path}/test_data_set_1' holds no input_0.pb; add the inputs" in refusal(tmp_path, specs)


@pytest.mark.parametrize("data", [b"\xff" * 40, b"\x08\x02\x10\x01\x4a\x10\x00\x00", b""], ids=["junk", "cut", "empty"])
def test_unreadable_tensor(specs: Specs, tmp_path: Path, data: bytes) -> None:
    folder = test_set(tmp_path / "set", sample())
    (folder / "input_0.pb").write_bytes(data)
    message = refusal(folder, specs)
    assert f"{folder}/input_0.pb: " in message
    assert message.endswith("write it again with onnx.numpy_helper.from_array")


def test_dims_that_do_not_fit_the_data(specs: Specs, tmp_path: Path) -> None:
    folder = test_set(tmp_path / "set", sample())
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[1 << 40, 1 << 20], raw_data=bytes(8))
    (folder / "input_0.pb").write_bytes(tensor.SerializeToString())
    assert "input 'input_ids' is damaged (type 7, dims [1099511627776, 1048576], 8 raw bytes)" in refusal(folder, specs)


def test_external_data_is_not_followed(specs: Specs, tmp_path: Path) -> None:
    folder = test_set(tmp_path / "set", sample())
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.INT64, dims=[2, 3])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    (folder / "input_0.pb").write_bytes(tensor.SerializeToString())
    message = refusal(folder, specs)
    assert "input 'input_ids' keeps its data in another file; save it with the data inside" in message


def test_folder_of_several_kinds(specs: Specs, tmp_path: Path) -> None:
    test_set(tmp_path / "test_data_set_0", sample())
    np.savez(tmp_path / "0.npz", **sample())
    assert "holds samples of several kinds (0.npz, test_data_set_0); point at one of them" in refusal(tmp_path, specs)
