"""Number formats of training: one module for each plugin."""
