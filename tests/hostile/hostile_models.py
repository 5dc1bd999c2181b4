"""Model files that must be refused, each built by code into an empty folder, with a part of the expected message."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper


@dataclass(frozen=True)
class Hostile:
    """`build` writes the files into a folder and returns the path to load."""

    name: str
    build: Callable[[Path], Path]
    message: str


def valid_model(*, opset: int = 17, initializers: Sequence[TensorProto] = ()) -> onnx.ModelProto:
    """y = x + w with four weights; what the hostile models differ from in one thing."""
    weights = list(initializers) or [
        helper.make_tensor("w", TensorProto.FLOAT, [4], np.arange(4, dtype=np.float32).tobytes(), raw=True)
    ]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", weights[0].name], ["y"], name="add")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def external_tensor(
    location: str | None = "w.bin", *, name: str = "w", dims: Sequence[int] = (4,), **entries: str | int
) -> TensorProto:
    """A float32 tensor whose data is `location`, with further entries such as offset and length."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims, data_location=TensorProto.EXTERNAL)
    fields = {} if location is None else {"location": location}
    for key, value in (fields | entries).items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _second_location(location: str) -> TensorProto:
    tensor = external_tensor()
    tensor.external_data.add(key="location", value=location)
    return tensor


def _file(data: bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path = folder / "m.onnx"
        path.write_bytes(data)
        return path

    return build


def _model(change: Callable[[onnx.ModelProto], object]) -> Callable[[Path], Path]:
    model = valid_model()
    change(model)
    return _file(model.SerializeToString())


def _external(tensor: TensorProto, prepare: Callable[[Path], object] | None = None) -> Callable[[Path], Path]:
    """A model in `m/` with 16 bytes of weights in `m/w.bin` and 16 bytes outside in `secret.bin`."""

    def build(folder: Path) -> Path:
        home = folder / "m"
        home.mkdir()
        (home / "w.bin").write_bytes(bytes(16))
        (folder / "secret.bin").write_bytes(bytes(16))
        if prepare is not None:
            prepare(home)
        return _file(valid_model(initializers=[tensor]).SerializeToString())(home)

    return build


def _folder(folder: Path) -> Path:
    (folder / "m.onnx").mkdir()
    return folder / "m.onnx"


def _loop(folder: Path) -> Path:
    (folder / "m.onnx").symlink_to("m.onnx")
    return folder / "m.onnx"


def _garbage(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def _damaged_inside() -> bytes:
    """Right at the outermost level, wrong within the graph."""
    raw = bytearray(valid_model().SerializeToString())
    position = raw.index(b"add")
    raw[position - 1] = 0xFF
    return bytes(raw)


def _in_attribute(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["c"], name="held", value=external_tensor("../c.bin")))


def _in_branch(model: onnx.ModelProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [external_tensor("../b.bin", name="branch_weight")])
    model.graph.node.append(helper.make_node("If", ["x"], ["z"], name="if", then_branch=branch, else_branch=branch))


def _in_function(model: onnx.ModelProto) -> None:
    constant = helper.make_node("Constant", [], ["c"], name="in_body", value=external_tensor("../f.bin"))
    body = [constant, helper.make_node("Add", ["a", "c"], ["b"])]
    imports = [helper.make_opsetid("", 17)]
    model.functions.append(helper.make_function("local", "F", ["a"], ["b"], body, imports))


def _in_sparse(model: onnx.ModelProto) -> None:
    values = external_tensor("../s.bin", name="sparse_weight")
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=values, dims=[8]))


def _function_opset(model: onnx.ModelProto) -> None:
    body = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("local", "F", ["a"], ["b"], body, [helper.make_opsetid("", 999)]))


def _bad_utf8() -> bytes:
    """A location that is no text; protobuf reads it, as bytes."""
    return valid_model(initializers=[external_tensor("w.bin")]).SerializeToString().replace(b"w.bin", b"w\xff\xfein")


def _huge(dims: Sequence[int]) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        del model.graph.initializer[0].dims[:]
        model.graph.initializer[0].dims.extend(dims)

    return change


_RAW = valid_model().SerializeToString()
_TENSOR = helper.make_tensor("t", TensorProto.FLOAT, [4], [1.0, 2.0, 3.0, 4.0]).SerializeToString()

FILES = (
    Hostile("missing", lambda folder: folder / "m.onnx", "m.onnx: no such file"),
    Hostile("in-a-missing-folder", lambda folder: folder / "no" / "m.onnx", "no such file"),
    Hostile("folder", _folder, "is a folder"),
    Hostile("link-loop", _loop, "cannot be read"),
    Hostile("below-a-file", lambda folder: _file(b"x")(folder) / "m.onnx", "cannot be read"),
    Hostile("name-too-long", lambda folder: folder / f"{'m' * 300}.onnx", "cannot be read"),
    Hostile("nul-in-name", lambda folder: folder / "m\0.onnx", "NUL"),
    Hostile("newline-in-name", lambda folder: folder / "m\nn.onnx", r"m\nn.onnx: no such file"),
    Hostile("json", lambda folder: folder / "m.json", "models as text (.json) are not read"),
    Hostile("textproto", lambda folder: folder / "m.textproto", "models as text (.textproto) are not read"),
    Hostile("empty", _file(b""), "is empty"),
    Hostile("lfs-pointer", _file(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n"), "git lfs pull"),
    Hostile("text", _file(b"ir_version: 8\n"), "is not an ONNX model"),
    Hostile("zip", _file(b"PK\x03\x04" + bytes(60)), "is not an ONNX model"),
    *(Hostile(f"garbage-{seed}", _file(_garbage(seed, 300)), "is not an ONNX model") for seed in range(6)),
    Hostile("garbage-that-parses", _file(b"\x08\x08\xa2\x06\x03abc"), "is not an ONNX model"),
    Hostile("garbage-with-a-long-field", _file(b"\x12\xff\x7fgarbage"), "is not an ONNX model"),
    Hostile("a-tensor", _file(_TENSOR), "is not an ONNX model"),
    Hostile("all-zero", _file(bytes(64)), "is not an ONNX model"),
    Hostile("damaged-inside", _file(_damaged_inside()), "is damaged"),
    Hostile("truncated-half", _file(_RAW[: len(_RAW) // 2]), "is truncated"),
    Hostile("truncated-one-byte", _file(_RAW[:-1]), "is truncated (1 or more bytes"),
)

MODELS = (
    Hostile("no-graph", _model(lambda m: m.ClearField("graph")), "it holds no graph"),
    Hostile("empty-graph", _model(lambda m: m.graph.Clear()), "it holds no graph"),
    Hostile("no-ir-version", _model(lambda m: m.ClearField("ir_version")), "no IR version"),
    Hostile("ir-version-0", _model(lambda m: setattr(m, "ir_version", 0)), "no IR version"),
    Hostile("no-opset", _model(lambda m: m.ClearField("opset_import")), "no opset of the default"),
    Hostile("other-opset", _model(lambda m: setattr(m.opset_import[0], "domain", "x")), "no opset of the default"),
    Hostile("opset-999", _model(lambda m: setattr(m.opset_import[0], "version", 999)), "uses opset 999"),
    Hostile("opset-0", _model(lambda m: setattr(m.opset_import[0], "version", 0)), "uses opset 0"),
    Hostile("two-opsets", _model(lambda m: m.opset_import.add(version=18)), "several opsets"),
    Hostile("function-opset-999", _model(_function_opset), "uses opset 999"),
    Hostile("huge-dims", _model(_huge([1 << 40, 1 << 40])), "'w' declares 1099511627776x1099511627776 elements"),
    Hostile("more-than-the-file", _model(_huge([1 << 20])), "'w' declares 1048576 elements"),
)

EXTERNAL = (
    Hostile("absolute", _external(external_tensor("/etc/passwd")), "tensor 'w' has its data in '/etc/passwd'"),
    Hostile("drive", _external(external_tensor("C:/w.bin")), "the location is absolute"),
    Hostile("parent", _external(external_tensor("../secret.bin")), "the location has '..'"),
    Hostile("parent-inside", _external(external_tensor("a/../../secret.bin")), "the location has '..'"),
    Hostile("backslash", _external(external_tensor("..\\secret.bin")), "backslash"),
    Hostile("empty-location", _external(external_tensor("")), "the location is empty"),
    Hostile("no-location", _external(external_tensor(None)), "the location is empty"),
    Hostile("nul-in-location", _external(external_tensor("w.bin\0x")), "NUL"),
    Hostile("location-not-utf8", _file(_bad_utf8()), "the location is not UTF-8"),
    Hostile("location-twice", _external(_second_location("../secret.bin")), "states the location of its data twice"),
    Hostile("newline-in-location", _external(external_tensor("w\n.bin")), r"'w\n.bin': no such file"),
    Hostile("newline-in-tensor", _external(external_tensor("/w", name="a\nb")), r"tensor 'a\nb' has its data"),
    Hostile("long-location", _external(external_tensor("w" * 5000)), "cannot be read"),
    Hostile("missing-data", _external(external_tensor("gone.bin")), "'gone.bin': no such file in"),
    Hostile("data-below-a-file", _external(external_tensor("w.bin/w")), "'w.bin/w': no such file in"),
    Hostile("data-is-a-folder", _external(external_tensor("d"), lambda home: (home / "d").mkdir()), "is not a file"),
    Hostile("data-is-a-pipe", _external(external_tensor("p"), lambda home: os.mkfifo(home / "p")), "is not a file"),
    Hostile(
        "link-out",
        _external(external_tensor("l.bin"), lambda home: (home / "l.bin").symlink_to("../secret.bin")),
        "'l.bin': a link leads out of the folder",
    ),
    Hostile(
        "linked-folder-out",
        _external(external_tensor("up/secret.bin"), lambda home: (home / "up").symlink_to("..")),
        "'up/secret.bin': a link leads out of the folder",
    ),
    Hostile(
        "dangling-link-out",
        _external(external_tensor("l.bin"), lambda home: (home / "l.bin").symlink_to("/nowhere/w.bin")),
        "'l.bin': a link leads out of the folder",
    ),
    Hostile("link-to-itself", _external(external_tensor("l"), lambda home: (home / "l").symlink_to("l")), "read"),
    Hostile("offset-negative", _external(external_tensor(offset=-4)), "offset '-4', which is not a non-negative"),
    Hostile("offset-hex", _external(external_tensor(offset="0x0")), "offset '0x0', which is not a non-negative"),
    Hostile("offset-other-digits", _external(external_tensor(offset="４")), "which is not a non-negative"),
    Hostile("offset-endless", _external(external_tensor(offset="9" * 5000)), "which is not a non-negative"),
    Hostile("offset-empty", _external(external_tensor(offset="")), "offset '', which is not a non-negative"),
    Hostile("length-negative", _external(external_tensor(length=-1)), "length '-1', which is not a non-negative"),
    Hostile("offset-past-end", _external(external_tensor(offset=64)), "needs bytes 64 to 80 of 'w.bin', which has 16"),
    Hostile("end-past-end", _external(external_tensor(offset=4)), "needs bytes 4 to 20 of 'w.bin', which has 16"),
    Hostile("length-past-end", _external(external_tensor(length=17)), "needs bytes 0 to 17 of 'w.bin'"),
    Hostile("length-too-short", _external(external_tensor(length=12)), "needs 16 bytes but its length"),
    Hostile("huge-external", _external(external_tensor(dims=[1 << 40, 1 << 40])), "of 'w.bin', which has 16"),
    Hostile("constant-attribute", _model(_in_attribute), "attribute 'value' of Constant node 'held' has its data"),
    Hostile("branch-initializer", _model(_in_branch), "tensor 'branch_weight' has its data in '../b.bin'"),
    Hostile("function-constant", _model(_in_function), "Constant node 'in_body' has its data in '../f.bin'"),
    Hostile("sparse-initializer", _model(_in_sparse), "sparse tensor 'sparse_weight' has its data in '../s.bin'"),
)

ALL = (*FILES, *MODELS, *EXTERNAL)
