"""From a checkpoint's tensors to a model's parameters, one parameter at a time.

A `WeightSource` names tensors the Hugging Face way, whatever file they lie in; a model's weight table
(`weight_names`) says which of them make one parameter. This file joins the two: it compares names and
shapes before anything is read and reports every mismatch at once. It knows no file format.
"""

from typing import Protocol

import numpy as np

from pagedjax.models.config import ModelConfig


class WeightSource(Protocol):
    """The tensors of one checkpoint, in Hugging Face names and [out, in] layout, read lazily."""

    @property
    def origin(self) -> str:
        """The file or directory, for messages."""
        ...

    @property
    def model_config(self) -> ModelConfig:
        """The model that these weights belong to."""
        ...

    def names(self) -> list[str]:
        """List every tensor, without reading any."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that `load` will return, without reading the tensor."""
        ...

    def load(self, name: str) -> np.ndarray:
        """Read one tensor as float32, float16 or bfloat16 (ml_dtypes).

        Raises:
            CheckpointError: the tensor cannot be read; the message names the file.
        """
        ...

    def close(self) -> None:
        """Release the files; arrays already loaded stay valid."""
        ...
