"""`python -m dsx_kernels.aio FOLDER...`: how fast offload files in these folders are."""

from __future__ import annotations

import argparse
import sys
from statistics import median

from dsx.errors import DsxError
from dsx_kernels.aio.files import Files
from dsx_kernels.aio.speed import SLAB, Speed


def main() -> None:
    """Write files, measure, remove them."""
    parser = argparse.ArgumentParser(prog="python -m dsx_kernels.aio", description=__doc__.partition(": ")[2])
    parser.add_argument("folders", nargs="+", metavar="FOLDER", help="on the disk, or one on each of several")
    parser.add_argument("--mib", type=int, default=1024, help="to write, 8 at least; default 1024")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is shown; default 3")
    parser.add_argument("--threads", type=int, default=16, help="for each folder; default 16")
    choices = parser.parse_args()
    try:
        files = Files(choices.folders, max(choices.mib << 20, SLAB), threads=choices.threads)
        speed = Speed(files)
        speed.write()
        for name, walk in (("read", speed.read), ("write", speed.write), ("update", speed.update)):
            print(f"{name:6}  {median(walk() for _ in range(choices.rounds)) / 1e9:6.2f} GB/s")
        way = "past the page cache" if all(files.direct) else "through the page cache: much of this is memory's speed"
        print(way)
        files.close()
    except DsxError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
