"""What the operating system provides: files, process, console, memory."""
