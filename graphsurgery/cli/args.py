"""Arguments that several verbs share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

__all__ = [
    "DataOption",
    "JsonFlag",
    "ModelArgument",
    "OutputOption",
    "QuietFlag",
    "RequiredData",
    "RequiredOutput",
]

ModelArgument = Annotated[str, Parameter(allow_leading_hyphen=True, help="ONNX file; - reads it from stdin.")]

_OUTPUT = Parameter(name=("--output", "-o"), allow_leading_hyphen=True, help="File to write; - writes to stdout.")

OutputOption = Annotated[str | None, _OUTPUT]

RequiredOutput = Annotated[str, _OUTPUT]

_DATA = Parameter(
    name="--data",
    show_default=False,
    help="Samples; may be given several times: a folder of .npz files, one .npz (keys are input names), an ONNX "
    "test_data_set_* folder or its parent, a QNN input_list.txt, or synthetic:N (made-up samples).",
)

DataOption = Annotated[tuple[str, ...], _DATA]

RequiredData = Annotated[tuple[str, ...], _DATA, Parameter(required=True)]

QuietFlag = Annotated[bool, Parameter(name="--quiet", help="No progress and no summary; errors and warnings stay.")]

JsonFlag = Annotated[bool, Parameter(name="--json", help="Print JSON instead of a table.")]
