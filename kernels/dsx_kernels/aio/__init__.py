"""Files for what does not fit into memory: read and written by threads, past the page cache, many at a time."""

from dsx_kernels.aio.files import Counts, Files, free
from dsx_kernels.aio.layout import BLOCK, PIECE
from dsx_kernels.aio.memory import aligned
from dsx_kernels.aio.native import Ticket, missing

__all__ = ["BLOCK", "PIECE", "Counts", "Files", "Ticket", "aligned", "free", "missing"]
