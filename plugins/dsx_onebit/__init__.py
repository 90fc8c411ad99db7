"""Optimizers whose updates travel as signs, one bit an element, once the variance of the gradients has settled.

onebit_adam.py   the plugin: Adam whose momentum is compressed (Tang et al. 2021, arXiv 2102.02888)
freeze.py        when the variance is frozen, and what it is turned into
exchange.py      signs to the owner of each part, their mean, and its signs to everyone
owned.py         the same where a rank updates 1/N only: what its owner changes travels
"""
