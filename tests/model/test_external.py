from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from google.protobuf.message import Message
from onnx import SparseTensorProto, TensorProto, helper

from graphsurgery.errors import UsageError
from graphsurgery.model.external import check_locations, external_tensors, may_hold_external


def _tensor(name: str, location: str = "w.bin", **entries: int) -> TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _inline(name: str) -> TensorProto:
    return helper.make_tensor(name, TensorProto.FLOAT, [4], [0.0, 1.0, 2.0, 3.0])


def _graph(name: str, tensors: list[TensorProto], nodes: list[onnx.NodeProto] | None = None) -> onnx.GraphProto:
    return helper.make_graph(nodes or [], name, [], [], tensors)


def _everywhere() -> onnx.ModelProto:
    """A tensor with external data in every place of a model that can hold one, between others without."""
    sparse = SparseTensorProto(values=_tensor("values"), indices=_tensor("indices"), dims=[8])
    nested = helper.make_node("Constant", [], ["n"], value=_tensor("nested"))
    inner = helper.make_node("Loop", ["m", ""], ["i"], body=_graph("inner", [_tensor("inner")], [nested]))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=_tensor("constant")),
        helper.make_node("Constant", [], ["d"], value=_inline("kept")),
        helper.make_node("Constant", [], ["s"], sparse_value=sparse),
        helper.make_node("ConstantOfShape", ["x"], ["f"], value=_tensor("fill")),
        helper.make_node(
            "If", ["b"], ["t"], then_branch=_graph("t", [_tensor("then")], [inner]), else_branch=_graph("e", [])
        ),
        helper.make_node("Custom", ["x"], ["u"], domain="com.custom", tables=[_inline("a"), _tensor("table")]),
        helper.make_node("Call", ["x"], ["v"], domain="com.custom", bodies=[_graph("g", [_tensor("listed")])]),
        helper.make_node("Relu", ["x"], ["y"]),
    ]
    graph = _graph("main", [_inline("inline"), _tensor("first"), _tensor("second")], nodes)
    graph.sparse_initializer.append(SparseTensorProto(values=_tensor("sv"), indices=_inline("si"), dims=[8]))
    body = [helper.make_node("Constant", [], ["k"], value=_tensor("function"))]
    function = helper.make_function("com.custom", "F", ["a"], ["k"], body, [helper.make_opsetid("", 17)])
    function.attribute_proto.append(helper.make_attribute("default", _tensor("default")))
    model = helper.make_model(graph, functions=[function], opset_imports=[helper.make_opsetid("", 17)])
    model.training_info.add(initialization=_graph("ti", [_tensor("training")]), algorithm=_graph("ta", []))
    return model


def _by_reflection(message: Message) -> Iterator[TensorProto]:
    """Every tensor with external data under a message, by its descriptor: slow, and complete by construction."""
    if isinstance(message, TensorProto) and message.data_location == TensorProto.EXTERNAL:
        yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for entry in [value] if isinstance(value, Message) else list(value):
                yield from _by_reflection(entry)


def test_find_every_external_tensor() -> None:
    model = _everywhere()
    found = [tensor.name for tensor in external_tensors(model)]
    assert sorted(found) == sorted(tensor.name for tensor in _by_reflection(model))
    assert len(found) == 15
    assert found[:2] == ["first", "second"]


def test_the_tensors_are_those_of_the_model() -> None:
    model = _everywhere()
    next(external_tensors(model)).external_data[0].value = "other.bin"
    assert model.graph.initializer[1].external_data[0].value == "other.bin"


def test_no_model_with_external_data_is_taken_for_one_without() -> None:
    for tensor in external_tensors(_everywhere()):
        alone = helper.make_model(_graph("g", [tensor]))
        for padding in range(3):
            alone.producer_name = "p" * padding
            assert may_hold_external(alone.SerializeToString())


def test_the_bytes_are_found_at_any_place() -> None:
    block = 1 << 20
    for place in (0, 1, 2, 5, block - 2, block - 1, block, block + 1, 2 * block - 1, 2 * block + 7):
        raw = bytearray(2 * block + 9) + b"location"
        assert not may_hold_external(bytes(raw))
        raw[place : place + 2] = b"\x70\x01"
        assert may_hold_external(bytes(raw)), place
        assert not may_hold_external(bytes(raw[:-1])), place
    assert not may_hold_external(b"")
    assert not may_hold_external(b"\x70")
    assert not may_hold_external(b"\x01\x70")


def test_a_plain_model_holds_none() -> None:
    assert not may_hold_external(helper.make_model(_graph("g", [_inline("w")])).SerializeToString())


def _model(*tensors: TensorProto) -> onnx.ModelProto:
    return helper.make_model(_graph("g", list(tensors)))


def test_distinct_locations_in_the_order_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.bin").write_bytes(bytes(64))
    (tmp_path / "sub" / "a.bin").write_bytes(bytes(32))
    model = _model(
        _tensor("p", "b.bin", offset=16, length=16),
        _tensor("q", "sub/a.bin", offset=16),
        _tensor("r", "b.bin", offset=48),
        _tensor("s", "./b.bin"),
    )
    assert check_locations(model, tmp_path, "m.onnx") == ("b.bin", "sub/a.bin", "./b.bin")
    assert check_locations(_model(_inline("w")), tmp_path, "m.onnx") == ()


def test_a_range_may_end_with_the_file_and_no_later(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(64))
    assert check_locations(_model(_tensor("w", offset=48, length=16)), tmp_path, "m.onnx") == ("w.bin",)
    with pytest.raises(UsageError, match=r"needs bytes 49 to 65 of 'w\.bin', which has 64"):
        check_locations(_model(_tensor("w", offset=49, length=16)), tmp_path, "m.onnx")


@pytest.mark.parametrize("name", [name for name in TensorProto.DataType.keys() if name != "UNDEFINED"])  # noqa: SIM118
def test_bytes_asked_for_by_each_element_type(tmp_path: Path, name: str) -> None:
    number = TensorProto.DataType.Value(name)
    if name == "STRING":
        needed = 0
    elif name.startswith("FLOAT6"):
        needed = 3 * 6 // 8 + 1
    elif name.endswith("INT2"):
        needed = 1
    elif name.endswith("INT4") or name.startswith("FLOAT4"):
        needed = 2
    else:
        needed = 3 * np.dtype(helper.tensor_dtype_to_np_dtype(number)).itemsize
    tensor = _tensor("w")
    tensor.data_type = number
    tensor.dims[:] = [3]
    (tmp_path / "w.bin").write_bytes(bytes(needed))
    assert check_locations(_model(tensor), tmp_path, "m.onnx") == ("w.bin",)
    if needed:
        (tmp_path / "w.bin").write_bytes(bytes(needed - 1))
        with pytest.raises(UsageError, match=f"needs bytes 0 to {needed} of"):
            check_locations(_model(tensor), tmp_path, "m.onnx")


def test_without_a_folder_only_the_text_is_checked() -> None:
    assert check_locations(_model(_tensor("w", "nowhere.bin", offset=9)), None, "<stdin>") == ("nowhere.bin",)
    with pytest.raises(UsageError, match=r"<stdin>: tensor 'w' has its data in '\.\./w\.bin': the location has '\.\.'"):
        check_locations(_model(_tensor("w", "../w.bin")), None, "<stdin>")


@pytest.mark.parametrize("location", ["..w", "w..bin", "a/..b/c", "...", "-", "c", "C"])
def test_names_that_only_look_like_a_way_out(tmp_path: Path, location: str) -> None:
    path = tmp_path / location
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(16))
    assert check_locations(_model(_tensor("w", location)), tmp_path, "m.onnx") == (location,)


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "w.bin").write_bytes(bytes(16))
    (tmp_path / "w.bin").symlink_to("real/w.bin")
    assert check_locations(_model(_tensor("w")), tmp_path, "m.onnx") == ("w.bin",)


def test_a_model_whose_folder_is_reached_by_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "w.bin").write_bytes(bytes(16))
    (tmp_path / "alias").symlink_to("real")
    model_path = tmp_path / "alias" / "m.onnx"
    assert check_locations(_model(_tensor("w")), model_path.parent, "m.onnx", model_path=model_path) == ("w.bin",)


def _download_cache(root: Path) -> Path:
    """blobs/ holds the files under their hashes, snapshots/<revision>/onnx/ holds links to them."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "0a1b" / "onnx"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "1111").write_bytes(_model(_tensor("w", "m.onnx_data")).SerializeToString())
    (blobs / "2222").write_bytes(bytes(16))
    (snapshot / "m.onnx").symlink_to("../../../blobs/1111")
    (snapshot / "m.onnx_data").symlink_to("../../../blobs/2222")
    return snapshot / "m.onnx"


def test_a_download_cache_of_links_is_accepted(tmp_path: Path) -> None:
    path = _download_cache(tmp_path)
    model = onnx.load(path, load_external_data=False)
    assert check_locations(model, path.parent, "m.onnx", model_path=path) == ("m.onnx_data",)


def test_a_link_in_a_download_cache_leads_to_the_blobs_only(tmp_path: Path) -> None:
    path = _download_cache(tmp_path / "cache")
    (tmp_path / "secret").write_bytes(bytes(16))
    model = onnx.load(path, load_external_data=False)
    data = path.with_name("m.onnx_data")
    for aim in (tmp_path / "secret", tmp_path / "cache" / "snapshots" / "secret"):
        data.unlink()
        data.symlink_to(aim)
        with pytest.raises(UsageError, match=r"'m\.onnx_data': a link leads out of the folder"):
            check_locations(model, path.parent, "m.onnx", model_path=path)


def test_the_same_links_beside_a_model_that_is_no_link_are_refused(tmp_path: Path) -> None:
    path = _download_cache(tmp_path)
    raw = path.read_bytes()
    path.unlink()
    path.write_bytes(raw)
    with pytest.raises(UsageError, match=r"'m\.onnx_data': a link leads out of the folder"):
        check_locations(onnx.load_from_string(raw), path.parent, "m.onnx", model_path=path)
