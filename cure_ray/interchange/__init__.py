"""Take a network elsewhere, or bring one from there: ONNX files, VNN-LIB and JSON properties."""

from cure_ray.interchange.onnx_read import load_onnx
from cure_ray.interchange.onnx_write import onnx_model, write_onnx
from cure_ray.interchange.vnnlib import Exported, ball_property, vnnlib_property, write_properties

__all__ = ["Exported", "ball_property", "load_onnx", "onnx_model", "vnnlib_property", "write_onnx", "write_properties"]
