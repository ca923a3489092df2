"""Parts beneath all others: files, process, console, memory, compilation."""
