"""ONNX graphs as torch graphs: the GPU engine for ONNX files."""
