"""Rewrites the softmax of exported ONNX attention to the unified max form."""
