"""Owns two operator schemas that torchvision wants to find when it is imported. It implements neither.

torchvision's wheels are linked against CUDA builds of torch. Beside a CPU build their compiled half does not load, and
the Python half then fails at import, because it registers fake kernels for operators that do not exist. sglang imports
torchvision whatever model it serves.
"""

import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators once, just before torchvision is looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _KEPT.append(self)
        return


_KEPT = []
"""A library that is collected takes its schemas with it."""

sys.meta_path.insert(0, _BeforeTorchvision())
