"""Offload: states in host memory or in files, under any layout, and an update that runs beside the next step.

claims.py           what a tier was told to take, within its budget
lending.py          copies on the device of what rests elsewhere
host.py             memory of the host
buffers.py          memory for what is on its way to or from files
extents.py          where states lie in files
disk.py             files
cpu_offload.py, nvme_offload.py, delayed_update.py, early_update.py   the plugins
"""
