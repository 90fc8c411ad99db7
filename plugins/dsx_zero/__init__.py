"""ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models") as layouts.

stage   parameters  gradients  optimizer   bytes per parameter on one of N ranks, fp32 AdamW, one micro-batch
zero1   whole       whole      1/N         8 + 8/N
zero2   whole       1/N        1/N         4 + 12/N

layout.py     what both share: shards of flat parameters, publishing, states as whole tensors
zero1.py      gradients stay whole until the last micro-batch, then each rank gets the average of its part
zero2.py      each micro-batch's gradients are reduced to 1/N as they arrive
"""
