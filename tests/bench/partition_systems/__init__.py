"""The systems that `partition.py` compares, and the processes in which they run."""
