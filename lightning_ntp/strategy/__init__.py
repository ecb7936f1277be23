"""When to act: Lightning hooks, FSDP2, process groups."""
