"""Checkpoints: logical tensors by parameter name, written so that a crash at any instant leaves the previous one whole.

boxes.py        slices of N-dimensional tensors as rectangles
slices.py       a logical tensor of which this rank holds a slice, as torch.distributed.checkpoint wants it
content.py      what of an engine is saved
description.py  what a model tells of itself
items.py        one rank's part of one tensor on disk, in pieces
storage.py      files with checksums; reading runs no code
folder.py       one checkpoint: written under a temporary name, then renamed
wanted.py       what of it goes where, when it is loaded
resize.py       states that each rank has for itself, on another number of ranks
archive.py      reading one without ranks, engine or model
series.py       the checkpoints of a run: `latest`, keep the last few, sweep what a crash left
together.py     an error of one rank becomes the same error on all
"""
