"""Observers: they listen to a run and change nothing."""
