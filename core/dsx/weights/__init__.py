"""Weights as safetensors files, in the layout of Hugging Face, written piece by piece.

header.py   the format: what a file begins with
writer.py   one file, or several with an index
folder.py   a folder that appears whole or not at all
archive.py  from a checkpoint, without ranks or model
live.py     from an engine, one unit whole at a time
"""
