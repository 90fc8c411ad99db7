"""`dsx report`: runs as one page of curves, from the lines that the observer `jsonl` wrote."""
