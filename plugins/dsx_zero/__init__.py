"""ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models") as layouts.

stage   parameters  gradients  optimizer   bytes per parameter on one of N ranks, fp32 AdamW, one micro-batch
zero1   whole       whole      1/N         8 + 8/N
zero2   whole       1/N        1/N         4 + 12/N
zero3   1/N         1/N        1/N         16/N

zero1.py, zero2.py, zero3.py   the stages: whose parameters and whose gradients
whole_parameters.py            each rank's part is published after an update
sharded_parameters.py          a unit is gathered before it is used and released after, by
    residence.py               the buffers that come and go, over rooms.py, their memory, and
    passes.py                  the order of gathers, which merge.py makes of what ranks did
    released.py, recall.py     what a parameter is meanwhile, and weights that autograd saved
whole_gradients.py             whole until the last micro-batch, then averaged to 1/N
sharded_gradients.py           averaged to 1/N in each micro-batch
gradients.py, layout.py        what these share
"""
