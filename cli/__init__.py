"""The command line: words become calls."""
