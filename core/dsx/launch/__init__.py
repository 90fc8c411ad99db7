"""Starting ranks on this host, and joining them to one process group."""
