"""Plugins for dsx, each one file."""
