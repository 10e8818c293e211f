"""The program around the commands: errors, console, progress, tables, processes."""
