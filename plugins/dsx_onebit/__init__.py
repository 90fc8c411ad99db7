"""Optimizers whose updates travel as signs, one bit an element, once the variance of the gradients has settled.

onebit_adam.py    the plugin: Adam whose momentum is compressed (Tang et al. 2021, arXiv 2102.02888)
onebit_lamb.py    the plugin: the same with a size for each parameter's step (Li et al. 2022, arXiv 2104.06069)
zero_one_adam.py  the plugin: Adam whose ranks also make updates of their own (Lu et al. 2022, arXiv 2202.06009)
phases.py         what the first two share: as usual until the freeze, compressed after it
freeze.py         when the variance is frozen, and what it is turned into
intervals.py      updates at growing distances
exchange.py       signs to the owner of each part, their mean, and its signs to everyone
owned.py          the same where a rank updates 1/N only: what its owner changes travels
steps.py          Adam's step, a gradient into a momentum, room to work in
"""
