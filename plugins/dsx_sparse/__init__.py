"""Block-sparse attention: patterns, each a plugin, over the operation `block_attention`."""
