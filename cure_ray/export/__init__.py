"""Take a network elsewhere, or bring one from there: ONNX files, VNN-LIB and JSON properties."""

from cure_ray.export.onnx_file import onnx_model, write_onnx
from cure_ray.export.onnx_import import load_onnx
from cure_ray.export.properties import ball_property, vnnlib_property, write_properties

__all__ = ["ball_property", "load_onnx", "onnx_model", "vnnlib_property", "write_onnx", "write_properties"]
