"""`python -m dsx` is the command `dsx`."""

from dsx.cli import main

if __name__ == "__main__":
    main()
