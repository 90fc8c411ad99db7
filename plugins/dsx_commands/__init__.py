"""Commands that look at what belongs to no plugin: one module for each."""
