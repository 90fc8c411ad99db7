"""A real model and real text to train it on: `dsx_text:gpt` and `dsx_text:files`."""

from dsx_text.model import gpt
from dsx_text.source import files

__all__ = ["files", "gpt"]
