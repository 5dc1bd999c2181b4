"""The committed fixture models: what fixtures.json says of them holds, and they run on their samples."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime
import pytest

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = Path(__file__).parent.parent / "fixtures"
TABLE: dict[str, Any] = json.loads((FOLDER / "fixtures.json").read_text())
MODELS: dict[str, dict[str, Any]] = TABLE["models"]
ARCHITECTURES = {
    "bert", "deberta_v2", "gemma2", "gpt2", "gpt_oss", "llama", "llama_decode", "qwen3", "swin", "t5", "whisper",
}  # fmt: skip
PATHS = re.compile(rb"/(?:home|mnt|opt|private|root|srv|tmp|usr|var|work\w*|Users)/|site-packages|[A-Z]:\\\\?Users")
DTYPES = {"tensor(int64)": np.int64, "tensor(float)": np.float32, "tensor(float16)": np.float16}

each_model = pytest.mark.parametrize("name", sorted(MODELS))


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def samples(name: str) -> list[dict[str, np.ndarray]]:
    folder = FOLDER / MODELS[name]["data"]
    feeds: list[dict[str, np.ndarray]] = []
    for number in range(MODELS[name]["samples"]):
        with np.load(folder / f"{number}.npz") as archive:
            feeds.append(dict(archive))
    return feeds


@pytest.fixture
def export() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fixtures_export", FOLDER / "export.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_table_lists_the_files() -> None:
    assert TABLE["schema"] == "graphsurgery/fixtures/1"
    assert set(MODELS) == {path.name for path in FOLDER.glob("*.onnx")}
    folders = {path.relative_to(FOLDER).as_posix() for path in (FOLDER / "data").iterdir()}
    assert {entry["data"] for entry in MODELS.values()} == folders


def test_every_architecture_through_both_exporters() -> None:
    pairs = {(entry["architecture"], entry["exporter"]) for entry in MODELS.values()}
    assert pairs == {(name, exporter) for name in ARCHITECTURES for exporter in ("dynamo", "torchscript")}
    assert {entry["architecture"] for entry in MODELS.values() if entry["dtype"] == "float16"} == {"bert", "llama"}


def test_total_size() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) <= 15_000_000


def test_no_file_names_a_path_of_the_machine_that_made_it() -> None:
    files = [*FOLDER.glob("*.onnx"), *FOLDER.rglob("*.npz"), FOLDER / "fixtures.json"]
    assert PATHS.search(b'File "/usr/lib/python3/a.py", line 1')
    assert [path.name for path in files if PATHS.search(path.read_bytes())] == []


@each_model
def test_model_is_what_the_table_says(name: str) -> None:
    entry, data = MODELS[name], (FOLDER / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]
    assert len(data) == entry["bytes"]
    assert set(entry["versions"]) == {"torch", "transformers", "onnxscript", "onnx", "onnxruntime"}
    model = onnx.load_model_from_string(data)
    onnx.checker.check_model(model, full_check=True)
    assert {item.domain: item.version for item in model.opset_import}[""] == entry["opset"]
    softmax = sum(node.op_type == "Softmax" for node in model.graph.node)
    assert softmax == entry["attention_sites"] + entry["not_attention"]
    floats = {item.data_type for item in model.graph.initializer if len(item.dims) == 2}
    assert {"float32": onnx.TensorProto.FLOAT, "float16": onnx.TensorProto.FLOAT16}[entry["dtype"]] in floats


@each_model
def test_model_runs_on_its_samples(name: str) -> None:
    runner, feeds = session(onnx.load(FOLDER / name)), samples(name)
    inputs = {item.name: item for item in runner.get_inputs()}
    for feed in feeds:
        assert list(feed) == list(inputs)
        for key, value in feed.items():
            assert value.dtype == DTYPES[inputs[key].type]
            fixed = [(want, got) for want, got in zip(inputs[key].shape, value.shape, strict=True) if want != got]
            assert all(isinstance(want, str) for want, _ in fixed)
        for item, output in zip(runner.get_outputs(), runner.run(None, feed), strict=True):
            assert output.dtype == DTYPES[item.type]
            assert output.size > 0
            assert np.isfinite(output).all(), item.name


@each_model
def test_samples_differ_in_shape_and_padding(name: str) -> None:
    feeds = samples(name)
    assert len(feeds) == 4
    assert len({tuple(value.shape for value in feed.values()) for feed in feeds}) >= 3
    masks = [value for feed in feeds for key, value in feed.items() if "mask" in key]
    if MODELS[name]["architecture"] == "swin":
        assert masks == []
        return
    assert len(masks) == 4
    assert all(set(np.unique(mask)) <= {0, 1} for mask in masks)
    assert any((mask == 0).any() for mask in masks)
    padded_side = 0 if MODELS[name]["architecture"] == "llama_decode" else -1
    assert all((mask[:, -1 - padded_side] == 1).all() for mask in masks)
    assert all((mask[1:, padded_side] == 0).all() for mask in masks)


def test_demo_decoder_has_realistic_scores() -> None:
    name = "llama_decode_sdpa_dynamo.onnx"
    model = onnx.load(FOLDER / name)
    scores = [node.input[0] for node in model.graph.node if node.op_type == "Softmax"]
    model.graph.output.extend(onnx.ValueInfoProto(name=score) for score in scores)
    runner = session(model)
    rows = [value for feed in samples(name) for value in runner.run(scores, feed)]
    maxima = np.concatenate([value.max(-1).ravel() for value in rows])
    assert maxima.min() > 1
    assert maxima.max() < 21
    assert maxima.max() - maxima.min() > 15
    visible = np.concatenate([value[value > -1e4].ravel() for value in rows])
    assert 2.5 < visible.std() < 4.5


def test_strip_paths_keeps_the_rest(export: ModuleType) -> None:
    inner = onnx.helper.make_node("Identity", ["x"], ["y"], doc_string='File "/home/a/b.py", line 3')
    body = onnx.helper.make_graph([inner], "body", [], [])
    node = onnx.helper.make_node("If", ["c"], ["z"], then_branch=body, else_branch=body, doc_string="/bert/encoder/If")
    for key, value in (
        ("pkg.torch.onnx.stack_trace", "short"), ("source", "/usr/lib/a.py"), ("namespace", "bert/encoder"),
    ):  # fmt: skip
        node.metadata_props.add(key=key, value=value)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "main", [], []))
    export.strip_paths(model)
    stripped = model.graph.node[0]
    assert [(entry.key, entry.value) for entry in stripped.metadata_props] == [("namespace", "bert/encoder")]
    assert stripped.doc_string == "/bert/encoder/If"
    assert [attribute.g.node[0].doc_string for attribute in stripped.attribute] == ["", ""]


@pytest.mark.parametrize(
    ("arguments", "missing", "message"),
    [
        ([], {"torch", "transformers"}, "torch, transformers not installed"),
        (["--only", "bertt"], set[str](), "--only bertt: no such fixture"),
    ],
)
def test_export_refuses_in_one_line(
    export: ModuleType, arguments: list[str], missing: set[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    assert export.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not (tmp_path / "out").exists()
