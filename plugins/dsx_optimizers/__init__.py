"""Optimizers: one module for each plugin, whose options have torch's names and defaults."""
